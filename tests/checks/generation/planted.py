"""A small GPT whose `generate` can be planted with one fault at a time, and one question to the stage."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.generation.stage import GenerationStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import preflight
from gpt_guard.records import CheckResult

V, BLOCK, WIDTH = 13, 8, 16


class TinyGPT(nn.Module):
    """One attention layer over learned positions; logits `[B, T, V]`."""

    def __init__(self, config: Any = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config or SimpleNamespace(vocab_size=V, block_size=BLOCK, dropout=dropout)
        self.tokens, self.positions = nn.Embedding(V, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, V)
        self.dropout = nn.Dropout(self.config.dropout)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], is_causal=True)
        logits: Tensor = self.head(self.dropout(x + self.out(mixed[:, 0])))
        return logits

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """As in many tutorials: crop, call, last position, temperature, top-k, softmax, draw, append."""
        for _ in range(max_new_tokens):
            logits = self(ids[:, -BLOCK:])[:, -1]
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    kept = logits.topk(min(top_k, V)).values[:, -1:]
                    logits = logits.masked_fill(logits < kept, -torch.inf)
                chosen = torch.multinomial(logits.softmax(dim=-1), 1)
            ids = torch.cat([ids, chosen], dim=1)
        return ids


Step = Callable[[TinyGPT, Tensor], Tensor]


def with_step(step: Step, dropout: float = 0.0) -> TinyGPT:
    """A TinyGPT whose generate appends what `step(model, ids)` chooses, `[B, 1]`, and has no settings."""

    class Planted(TinyGPT):
        @torch.no_grad()
        def generate(self, ids: Tensor, max_new_tokens: int) -> Tensor:  # type: ignore[override]  # fewer settings
            for _ in range(max_new_tokens):
                ids = torch.cat([ids, step(self, ids)], dim=1)
            return ids

    return Planted(dropout=dropout)


def with_generate(method: Callable[..., Any], dropout: float = 0.0) -> TinyGPT:
    """A TinyGPT with another generate altogether."""
    kind = type("Planted", (TinyGPT,), {"generate": method})
    planted: TinyGPT = kind(dropout=dropout)
    return planted


def draw(logits: Tensor) -> Tensor:
    """Sample ids `[B, 1]` from logits `[B, V]`."""
    return torch.multinomial(logits.softmax(dim=-1), 1)


def ask(model: nn.Module, **given: Any) -> PreflightReport:
    subject = Subject(model=model, **{"vocab_size": V, "block_size": BLOCK, **given})
    return preflight(subject, [GenerationStage()])


def line(report: PreflightReport, title: str) -> CheckResult:
    return next(result for result in report.checks if result.title == title)


def failures(report: PreflightReport) -> list[tuple[str, str]]:
    """Title and first code of each line that failed."""
    return [(result.title, result.findings[0].code) for result in report.failed]
