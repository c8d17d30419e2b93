"""A small healthy GPT whose parts can be exchanged, for the stages that look at a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import check
from gpt_guard.records import CheckResult

V, T, C, H = 23, 12, 16, 2


class Attention(nn.Module):
    """Causal attention; `mix` is what the variants exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def join(self, mixed: Tensor) -> Tensor:
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.proj(self.join(self.mix(q, k, v)))
        return out


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(C), attention(), nn.LayerNorm(C)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class GPT(nn.Module):
    """A healthy GPT with tied weights: `(logits, loss)`."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention, dropout: float = 0.0, tie: bool = True) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks: Any = nn.ModuleList(Block(attention, dropout) for _ in range(2))
        self.ln = nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)
        self.apply(self._init)
        if tie:
            self.head.weight = self.tok.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def positions(self, idx: Tensor) -> Tensor:
        return torch.arange(idx.size(1), device=idx.device)

    def logits(self, idx: Tensor) -> Tensor:
        x = self.tok(idx) + self.pos(self.positions(idx))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.ln(x))
        return out

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.logits(idx)
        return logits, None if targets is None else self.loss(logits, targets)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class ShiftsInside(GPT):
    """As Hugging Face: an object, and `labels` that are the ids themselves."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits(input_ids)
        return Output(logits, None if labels is None else self.loss(logits[:, :-1], labels[:, 1:]))


class LogitsOnly(GPT):
    def forward(self, idx: Tensor) -> Any:  # type: ignore[override]  # it takes no targets
        return self.logits(idx)


class LastOnly(GPT):
    """As nanoGPT: without targets only the last position."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.logits(idx)
        return (logits[:, [-1]], None) if targets is None else (logits, self.loss(logits, targets))


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    """Random ids, never 0; y is x advanced by one."""
    ids = torch.randint(1, V, (rows, T + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def ask_stage(stage: str, model: nn.Module | None = None, **options: Any) -> PreflightReport:
    """What one stage says of a model, the GPT by default, on a batch of random ids unless another is given."""
    if "batch" not in options:
        options["batch"] = batch()
    given = {"vocab_size": V, "block_size": T, **options}
    return check(GPT() if model is None else model, **given, only=[stage])


def line(report: PreflightReport, title: str) -> CheckResult:
    return next(result for result in report.checks if result.title == title)


class Convolution(nn.Module):
    def __init__(self, causal: bool, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.tok, self.causal = nn.Embedding(V, C), causal
        self.conv = nn.Conv1d(C, C, 3, padding=0 if causal else 1)
        self.norm = norm if norm is not None else nn.Identity()
        self.head = nn.Linear(C, V)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tok(x).transpose(1, 2)
        hidden = self.conv(F.pad(hidden, (2, 0)) if self.causal else hidden)
        out: Tensor = self.head(self.norm(hidden).relu().transpose(1, 2))
        return out


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool = True, bidirectional: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(V, C)
        self.rnn = nn.GRU(C, C, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(2 * C if bidirectional else C, V)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.tok(x))[0])
        return out
