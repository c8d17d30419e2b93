"""A model in which mode matters, in training under EvalModeAssert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def validate(model: nn.Module, batches: int = 1) -> None:
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn(8, 4))


class Run:
    """A model with its optimizers, and what a loop over them lets the guard say."""

    def __init__(self, model: nn.Module | None = None, optimizers: int = 1, **options: Any) -> None:
        self.model = model or net()
        parameters = list(self.model.parameters())
        self.optimizers: list[Optimizer] = [SGD(parameters[part::optimizers], lr=0.01) for part in range(optimizers)]
        self.guard = EvalModeAssert(**options)

    def train(self, steps: int = 1, *, before: Callable[[], object] | None = None, micro_batches: int = 1) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for _ in range(micro_batches):
                if before is not None:
                    before()
                x = torch.randn(8, 4)
                functional.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def sample(self, batches: int = 1) -> None:
        validate(self.model, batches)

    def watch(self, loop: Callable[[Guardian], object]) -> list[Finding]:
        guardian = Guardian(self.model, self.optimizers, guards=[self.guard], sinks=[])
        with guardian:
            loop(guardian)
        return list(guardian.findings)
