"""What the tests of clipping in light steps share: clipping, its norm, and a backward that spoils a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lane_kit import Act, batch

# The step in which something happens; it would be a light one.
BAD = 30
STEPS = 40


def with_gradients() -> nn.Module:
    """Two layers after a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model(torch.randn(16, 4)).square().sum().backward()
    return model


def clip_all(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


class Spoils(torch.autograd.Function):
    """Passes on what it is given; its backward spoils one element at `BAD`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        if ctx.value:
            grad.flatten()[0] = ctx.value
        return grad, None


def spoiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, act: Act = clip_all, value: float = math.nan
) -> Iterator[int]:
    """A plain loop whose backward spoils a gradient of the last layer at `BAD`; `act` runs after each backward."""
    layers = [*model.children()]
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        hidden = nn.Sequential(*layers[:-1])(x)
        weight = Spoils.apply(layers[-1].weight, value if step == BAD else 0.0)  # type: ignore[no-untyped-call]  # torch's own
        loss = F.cross_entropy(hidden @ weight.T + layers[-1].bias, y)
        loss.backward()  # the usual line
        act(step, model, optimizer)
        optimizer.step()
        yield step
