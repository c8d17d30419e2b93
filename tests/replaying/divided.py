"""What the tests of a surviving run share: a model that divides by zero in one batch, and a loop that goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard import Guardian

from .steps import Reads, sgd

BAD = 2
Step = Callable[[nn.Module, Tensor], Tensor]


class Divided(nn.Module):
    """Divides by what is 0 in the bad batch; `before` is what a subclass does with its surroundings first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        found: Tensor = self.layer(x / x.abs().sum(-1, keepdim=True))
        return found


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    found = [torch.randn(3, 4) for _ in range(5)]
    found[BAD].zero_()
    return found


def run(model: nn.Module, reads: Reads | None, step: Step, given: list[Tensor] | None = None, **options: Any) -> Any:
    """Train over the batches, guarded under a policy that only records, or bare (`reads` None)."""
    torch.manual_seed(2)
    optimizer = sgd(model)
    policy = {"error": "record", "warning": "record"}
    guardian = None if reads is None else Guardian(model, optimizer, sinks=[], policy=policy, reads=reads, **options)
    if guardian is not None:
        guardian.start()
    for x in batches() if given is None else given:
        optimizer.zero_grad()
        loss = step(model, x)
        loss.backward()
        if loss.isfinite():
            optimizer.step()
    if guardian is not None:
        guardian.stop()
    return next((each for each in guardian.findings if each.code == "GG101"), None) if guardian is not None else None


def mean(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).mean()
    return found


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]
