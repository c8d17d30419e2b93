"""What is measured: a small GPT and its loop as a person writes them, and models of which only one size grows.

Nothing here comes from the package or its example, so that nothing is tuned to what gpt_guard expects.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 65


@dataclass(frozen=True)
class Case:
    """A size of the model, and how many pairs of blocks of so many steps make a figure worth looking at."""

    block: int
    width: int
    heads: int
    layers: int
    batch: int
    pairs: int
    steps: int


CASES = {
    "tiny": Case(block=32, width=64, heads=4, layers=2, batch=8, pairs=15, steps=30),
    "deep": Case(block=16, width=32, heads=2, layers=48, batch=4, pairs=7, steps=10),
    "small": Case(block=256, width=384, heads=6, layers=6, batch=2, pairs=3, steps=5),
}


class CausalSelfAttention(nn.Module):
    """One projection for q, k and v, torch's own attention, one projection back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Layer(nn.Module):
    """Attention and an MLP, each normed first and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), CausalSelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Token ids `[B, T]` to logits `[B, T, V]`; the loss is the loop's."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, case.width), nn.Embedding(case.block, case.width)
        self.layers = nn.Sequential(*(Layer(case.width, case.heads) for _ in range(case.layers)))
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2: what is added to the stream is scaled by the number of additions.
                adds = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * case.layers) if adds else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def text(length: int) -> Tensor:
    """Ids `[length]` of a made-up language: each token has four successors, so there is something to learn."""
    draw = torch.Generator().manual_seed(1)
    successors = torch.randint(VOCAB, (VOCAB, 4), generator=draw).tolist()
    ids = [0]
    for choice in torch.randint(4, (length - 1,), generator=draw).tolist():
        ids.append(successors[ids[-1]][choice])
    return torch.tensor(ids)


class Loop:
    """A person's training loop, a step at a time; the same steps whether anyone watches or not."""

    def __init__(self, case: Case, *, clip: bool = True, varying: bool = False, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.case, self.clip, self.varying, self.accumulate = case, clip, varying, accumulate
        self.model = GPT(case)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ids = text(100_000)
        self.draw = torch.Generator().manual_seed(2)
        self.taken, self.loss = 0, 0.0

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.ids) - self.case.block - 1, (self.case.batch, 1), generator=self.draw)
        rows = self.ids[starts + torch.arange(self.case.block + 1)]
        return rows[:, :-1], rows[:, 1:]

    def step(self) -> None:
        if self.varying:
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 * (0.55 + 0.45 * math.cos(self.taken / 1000 * math.pi))
        self.taken += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = 0.0
        for _ in range(self.accumulate):
            x, y = self.batch()
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()) / self.accumulate
            loss.backward()
            self.loss += loss.item()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def times(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        return [timed(self) for _ in range(steps)]


class Same(nn.Module):
    """A module without parameters: a new tensor of the same values, so that only the number of modules counts."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


class Chain:
    """A loop on a model of so many modules, the root included; its parameters are the same few in any length."""

    LINEARS = 4

    def __init__(self, modules: int, width: int = 64) -> None:
        torch.manual_seed(0)
        between = modules - 1 - self.LINEARS
        if between < 0:
            raise ValueError(f"a chain has at least {self.LINEARS + 1} modules, not {modules}")
        parts: list[nn.Module] = []
        for place in range(self.LINEARS):
            parts.append(nn.Linear(width, width))
            parts += [Same() for _ in range(between * (place + 1) // self.LINEARS - between * place // self.LINEARS)]
        self.model = nn.Sequential(*parts)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.width = width

    def step(self) -> None:
        x = torch.randn(8, self.width)
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.model(x) - 0.5 * x).square().mean()
        loss.backward()
        self.optimizer.step()


def timed(loop: Loop | Chain) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    loop.step()
    return time.perf_counter() - start
