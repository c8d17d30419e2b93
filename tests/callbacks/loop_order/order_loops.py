"""What the tests of LoopOrder share: a net, batches, and a run of a loop's body under Guardian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

# (step, model, optimizer, what the loop keeps from step to step)
Body = Callable[[int, Any, Any, dict[str, Any]], None]
# The loop, the code of its finding, and words of the first cause, of the line, and of the sequence that was seen.
Case = tuple[Body, str, str, str, str]


def collected() -> tuple[list[Body], Callable[[Body], Body]]:
    """A list, and a decorator that puts loops into it."""
    found: list[Body] = []

    def collect(body: Body) -> Body:
        found.append(body)
        return body

    return found, collect


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4)
    return x, x[:, :3].argmax(1)


def cross_entropy(model: nn.Module, rows: int = 8) -> Tensor:
    x, y = batch(rows)
    return F.cross_entropy(model(x), y)


def run(
    body: Body,
    *,
    steps: int = 6,
    make: Callable[[Any], Any] = lambda parameters: SGD(parameters, lr=0.05),
    model: nn.Module | None = None,
    optimizers: Callable[[Any], Any] | None = None,
    guards: list[Guard] | None = None,
    reads: Any = "immediate",
    **options: Any,
) -> list[Finding]:
    """The findings of LoopOrder (or of `guards`) over some turns of a loop."""
    torch.manual_seed(0)
    model = net() if model is None else model
    optimizer = make(model.parameters()) if optimizers is None else optimizers(model)
    guards = [LoopOrder()] if guards is None else guards
    kept: dict[str, Any] = {}
    with Guardian(model, optimizer, guards=guards, summary=False, sinks=[], reads=reads, **options) as guardian:
        for step in range(steps):
            body(step, model, optimizer, kept)
    # What is said of a model that is never called is another matter.
    return [found for found in guardian.findings if not found.code.startswith("GG9")]


def plain(model: Any, optimizer: Any) -> None:
    """One usual step."""
    optimizer.zero_grad()
    cross_entropy(model).backward()
    optimizer.step()
