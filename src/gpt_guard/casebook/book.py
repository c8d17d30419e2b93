"""The casebook: which cases there are, what came of running one, and the text and model that the scripts share."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import entry
from gpt_guard.records import Finding, Severity

_PACKAGE = __name__.rpartition(".")[0]
Train = Callable[..., tuple[Finding, ...]]


class Expected(NamedTuple):
    """What a good answer to a case contains.

    `cause` is the key of the root cause in the catalogue; `place` is a piece of text that tells the stage, tensor or
    line, "" where the case asks for none.
    """

    code: str
    cause: str
    place: str = ""


class Case(NamedTuple):
    """One case: a script with `train(broken=...)`, which returns what was found."""

    number: int
    name: str
    title: str
    story: str
    expected: Expected
    train: Train

    @property
    def file(self) -> str:
        """Where the script is, to be read."""
        return inspect.getsourcefile(self.train) or ""


class CaseResult(NamedTuple):
    """What was said of the broken script and of its fixed twin, and how long both took (seconds)."""

    case: Case
    broken: tuple[Finding, ...]
    fixed: tuple[Finding, ...]
    seconds: float

    @property
    def finding(self) -> Finding | None:
        """The expected finding, if it was made."""
        return next((each for each in self.broken if each.code == self.case.expected.code), None)

    @property
    def named(self) -> bool:
        """Whether the root cause comes first."""
        found = self.finding
        return found is not None and found.causes[:1] == (self._cause(),)

    def _cause(self) -> str:
        wanted = self.case.expected
        return next(each.text for each in entry(wanted.code).causes if each.key == wanted.cause)

    @property
    def placed(self) -> bool:
        """Whether the finding tells the place; True for a case that asks for none."""
        found = self.finding
        return found is not None and self.case.expected.place in where(found)

    @property
    def others(self) -> tuple[Finding, ...]:
        """What else was said of the broken script, above mere information."""
        return tuple(each for each in self.broken if each is not self.finding and each.severity is not Severity.INFO)

    @property
    def silent(self) -> bool:
        """Whether nothing was said of the fixed twin, mere information apart."""
        return all(each.severity is Severity.INFO for each in self.fixed)

    @property
    def solved(self) -> bool:
        """Found, by its cause, at its place, and no word against the twin."""
        return self.named and self.placed and self.silent


def where(found: Finding) -> str:
    """All that a finding says about a place, as one text."""
    line = str(found.where) if found.where is not None else ""
    return " ".join(filter(None, (line, found.module, found.parameter, found.position, found.seen)))


def cases() -> list[Case]:
    """All cases in order; imports torch."""
    book = import_module(_PACKAGE)
    names = sorted(each.name for each in iter_modules(book.__path__) if each.name.startswith("case_"))
    return [_case(import_module(f"{_PACKAGE}.{name}")) for name in names]


def _case(script: ModuleType) -> Case:
    _, number, name = script.__name__.rpartition(".")[2].split("_", 2)
    title, _, story = (inspect.getdoc(script) or "").partition("\n\n")
    return Case(int(number), name.replace("_", " "), title, " ".join(story.split()), script.EXPECTED, script.train)


def run_case(case: Case) -> CaseResult:
    """Train the broken script and its fixed twin, a second or so each; prints nothing and leaves no file."""
    start = time.perf_counter()
    broken, fixed = case.train(broken=True), case.train(broken=False)
    return CaseResult(case, broken, fixed, time.perf_counter() - start)


VOCABULARY = 18


def token_ids(length: int, seed: int = 0) -> Tensor:
    """Ids `[length]` of a text in which each word is followed by one of three: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    followers = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(7))
    ids = [0]
    for choice in torch.randint(3, (length - 1,), generator=generator).tolist():
        ids.append(int(followers[ids[-1], choice]))
    return torch.tensor(ids)


def windows(ids: Tensor, block_size: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of inputs and targets `[B, T]`, the targets one further."""
    starts = torch.randint(len(ids) - block_size - 1, (batch,), generator=generator).tolist()
    x = torch.stack([ids[start : start + block_size] for start in starts])
    y = torch.stack([ids[start + 1 : start + 1 + block_size] for start in starts])
    return x, y


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (self.split(each) for each in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, C]` to `[B, H, T, D]`."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class Block(nn.Module):
    """Attention and MLP, each with its residual."""

    def __init__(self, width: int, heads: int, dropout: float, attention: type[Attention]) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        x = x + self.dropout(self.mlp(self.before_mlp(x)))
        return x


class SmallGPT(nn.Module):
    """Logits `[B, T, V]` for ids `[B, T]`."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = 32,
        heads: int = 4,
        blocks: int = 2,
        block_size: int = 16,
        dropout: float = 0.0,
        attention: type[Attention] = Attention,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
