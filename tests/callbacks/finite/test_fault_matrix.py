"""Every kind of fault, at every place, in both read modes: halted before the update, and the right one named."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.testing import inject_nonfinite

STEP = 5
WIDTH, VOCAB, LENGTH = 8, 11, 6
Reads = Literal["immediate", "per_step"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.break_scores = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(WIDTH, -1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(future, -math.inf)
        mixed = scores.softmax(-1) @ v + self.break_scores
        return self.proj(mixed)  # type: ignore[no-any-return]  # a call of a module is Any


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.break_between = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        x = x + self.break_between
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]  # a call of a module is Any


class GPT(nn.Module):
    """Takes float features as well as token ids, so that a batch can be bad; holds float buffers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1])) + features * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))  # type: ignore[no-any-return]  # a call of a module is Any


@dataclass
class Run:
    """A loop as a person writes it, with the state it had before each step."""

    model: GPT
    optimizer: torch.optim.Optimizer
    loss_term: float = 0.0
    broken_at: tuple[Any, str, float] | None = None
    before: Any = None
    after: Any = None

    @classmethod
    def new(cls) -> Run:
        model = GPT()
        return cls(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def loss(self) -> Tensor:
        ids = torch.randint(VOCAB, (4, LENGTH))
        logits = self.model(ids, torch.randn(4, LENGTH, WIDTH))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss + self.loss_term

    def train(self, steps: int = STEP + 3) -> None:
        try:
            for step in range(steps):
                if step == STEP and self.broken_at is not None:
                    setattr(*self.broken_at)
                if step == STEP:
                    self.before = self.state()
                self.step()
        finally:
            self.after = self.state()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        # One bad gradient makes all of them bad here.
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def same(one: Any, other: Any) -> bool:
    """Bit-identical, NaN included."""
    if isinstance(one, Tensor):
        return bool(one.dtype == other.dtype) and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@dataclass(frozen=True)
class Fault:
    """A place to break, and what must be said of it."""

    name: str
    code: str
    path: str = ""
    at: str | None = None
    module: str | None = None
    parameter: str | None = None
    received_by: str | None = None
    after: str | None = None
    line: str | None = None
    attribute: str | None = None


def output(path: str, line: str) -> Fault:
    return Fault(f"output of {path}", "GG101", path, module=path, line=line)


def between(path: str, module: str, after: str | None, line: str) -> Fault:
    return Fault(f"before {path}", "GG101", path, "input", module, received_by=path, after=after, line=line)


def functional(path: str, attribute: str, receiver: str, after: str, line: str) -> Fault:
    name = f"{attribute} in {path}"
    return Fault(name, "GG101", path, None, path, None, receiver, after, line, attribute)


def gradient(path: str) -> Fault:
    return Fault(f"gradient of {path}", "GG104", path, "gradient", path.rpartition(".")[0], path, line=".backward()")


BLOCKS = [f"blocks.{place}" for place in range(3)]
FAULTS = [
    Fault("batch", "GG103", "", "batch", "", line="self.model(ids"),
    output("tok", "self.tok(ids)"),
    *(output(f"{b}.mlp.0", "self.mlp(self.ln2(x))") for b in BLOCKS),
    *(output(f"{b}.attn", "self.attn(self.ln1(x))") for b in BLOCKS),
    *(output(f"{b}.attn.proj", "self.proj(mixed)") for b in BLOCKS),
    *(output(f"{b}.ln1", "self.ln1(x)") for b in BLOCKS),
    output("blocks.1.mlp", "self.mlp(self.ln2(x))"),
    output("blocks.1", "x = block(x)"),
    output("ln", "self.head(self.ln(x))"),
    output("head", "self.head(self.ln(x))"),
    *(between(f"{b}.ln2", b, f"{b}.attn", "self.mlp(self.ln2(x))") for b in BLOCKS),
    *(between(f"{b}.attn.proj", f"{b}.attn", f"{b}.attn.qkv", "self.proj(mixed)") for b in BLOCKS),
    *(functional(b, "break_between", f"{b}.ln2", f"{b}.attn", "self.mlp(self.ln2(x))") for b in BLOCKS),
    *(functional(f"{b}.attn", "break_scores", f"{b}.attn.proj", f"{b}.attn.qkv", "self.proj(mixed)") for b in BLOCKS),
    between("blocks.0", "", "pos", "x = block(x)"),
    between("blocks.1.mlp.2", "blocks.1.mlp", "blocks.1.mlp.1", "self.mlp(self.ln2(x))"),
    between("ln", "", "blocks.2", "self.head(self.ln(x))"),
    gradient("blocks.0.mlp.0.weight"),
    gradient("blocks.1.attn.qkv.bias"),
    gradient("blocks.2.ln1.weight"),
    gradient("ln.bias"),
    gradient("tok.weight"),
    Fault("gradient into a block", "GG104", "blocks.1", "gradient", "blocks.1.mlp.2", line=".backward()"),
    Fault("gradient into attention", "GG104", "blocks.1.attn", "gradient", "blocks.1.attn.proj", line=".backward()"),
    Fault("gradient into the head", "GG104", "head", "gradient", "head", "tok.weight", line=".backward()"),
    Fault("gradient into the embedding", "GG104", "tok", "gradient", "tok", "tok.weight", line=".backward()"),
    Fault("parameter in step()", "GG106", "blocks.1.mlp.0.weight", "step", "blocks.1.mlp.0", "blocks.1.mlp.0.weight"),
    Fault("tied parameter in step()", "GG106", "head.weight", "step", "tok", "tok.weight"),
    Fault("parameter between steps", "GG105", "blocks.1.ln2.weight", None, "blocks.1.ln2", "blocks.1.ln2.weight"),
    Fault("tied parameter between steps", "GG105", "tok.weight", None, "tok", "tok.weight"),
    Fault("buffer", "GG107", "scale", None, "", "scale"),
    Fault("loss outside", "GG102", attribute="loss_term", line="self.loss().backward()"),
]


@contextmanager
def broken(run: Run, fault: Fault, value: float) -> Iterator[None]:
    if fault.attribute is not None:
        run.broken_at = (
            run if fault.attribute == "loss_term" else run.model.get_submodule(fault.path),
            fault.attribute,
            value,
        )
        yield
        return
    with inject_nonfinite(run.model, fault.path, at=fault.at, step=STEP, value=value) as injection:
        yield
        assert injection.fired


def check(found: Finding, fault: Fault, reads: Reads) -> None:
    assert found.code == fault.code, found.seen
    assert found.module == fault.module, found.origin
    assert found.step == STEP
    if fault.parameter is not None:
        assert found.parameter == fault.parameter
    if fault.received_by is not None:
        assert found.evidence["received_by"] == fault.received_by
        assert found.evidence.get("after") == fault.after
    if fault.code in ("GG101", "GG102", "GG103", "GG104"):
        assert found.micro_batch == 0
    if reads != "per_step" and fault.line is not None:
        assert found.where is not None
        assert found.where.file == __file__
        assert fault.line in found.where.text
    if reads == "per_step":
        assert found.where is None


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("inside", [True, False], ids=["guardian first", "fault first"])
def test_the_right_one_is_named_and_nothing_is_updated(fault: Fault, value: float, reads: Reads, inside: bool) -> None:
    run = Run.new()
    guardian = Guardian(run.model, run.optimizer, guards=[FiniteGuard()], sinks=[], reads=reads, replay=False)
    first, second = (guardian, broken(run, fault, value)) if inside else (broken(run, fault, value), guardian)
    with pytest.raises(NonFiniteError) as caught, first, second:
        run.train()
    check(caught.value.finding, fault, reads)
    if fault.code != "GG106":
        assert same(run.after, run.before)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_without_hooks_on_modules_the_door_is_named_and_nothing_is_updated(
    fault: Fault, value: float, reads: Reads
) -> None:
    run = Run.new()
    guard = FiniteGuard(modules=False)
    guardian = Guardian(run.model, run.optimizer, guards=[guard], sinks=[], reads=reads, replay=False)
    with pytest.raises(NonFiniteError) as caught, guardian, broken(run, fault, value):
        run.train()
    found = caught.value.finding
    assert (found.code, found.step) == (fault.code, STEP), found.seen
    if fault.code == "GG101":
        assert (found.module, found.position) == ("", "output")
    if fault.parameter is not None:
        assert found.parameter == fault.parameter
    if fault.code != "GG106":
        assert same(run.after, run.before)
