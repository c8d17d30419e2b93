"""What the tests of stage 13 share: the example's model in a very small size, and one question to the stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import check
from gpt_guard.records import CheckResult
from mini_gpt import MiniGPT, MiniGPTConfig

V, T, C = 11, 6, 8
CONFIG = MiniGPTConfig(V, block_size=T, embedding_dim=C, num_heads=2, dropout=0.1)


def mini(**changes: Any) -> MiniGPT:
    return MiniGPT(replace(CONFIG, **changes))


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (3, T + 1))
    return rows[:, :-1], rows[:, 1:]


def ask(model: nn.Module | None, **given: Any) -> PreflightReport:
    return check(model, only=["checkpoint"], **{"batch": batch(), **given})


def ask_about(build: Callable[[], nn.Module], **given: Any) -> PreflightReport:
    return ask(build(), make_model=build, **given)


def line(report: PreflightReport, title: str) -> CheckResult:
    return next(result for result in report.checks if result.title == title)


class Base(nn.Module):
    """Embedding, something in the middle that a subclass adds, head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, C), nn.Linear(C, V)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.tokens(ids)))
        return logits


class Rope(Base):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.outer(torch.arange(T), torch.arange(C)).cos(), persistent=False)
        self.register_buffer("mask", torch.full((T, T), -torch.inf).triu(1))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.angles[: x.size(1)]
