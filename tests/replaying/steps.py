"""What the tests of a replay share: a model that fails where it is told to, and a step that must halt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.records import OperationSeen

Reads = Literal["immediate", "per_step"]
both = pytest.mark.parametrize("reads", ["immediate", "per_step"])
Function = Callable[[Tensor], Tensor]


def root_of_negative(x: Tensor) -> Tensor:
    """Bad in the forward."""
    return (-x.abs() - 1).sqrt()


def root_at_zero(x: Tensor) -> Tensor:
    """Bad in the backward."""
    return (x * 0).sqrt() + x


def uneven(x: Tensor) -> Tensor:
    """Bad only for a large batch."""
    return x * float("inf") if x.detach().abs().max() > 100 else x


def same(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Net(nn.Module):
    """Two blocks, of which the second does what it is told; the loss too, if it is asked for."""

    def __init__(
        self,
        function: Function,
        *,
        first: Function = torch.tanh,
        with_loss: bool = False,
        checkpointed: bool | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(first), Block(function), nn.Linear(4, 1)
        self.with_loss, self.checkpointed = with_loss, checkpointed

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        x = self.second(x) if self.checkpointed is None else checkpoint(self.second, x, use_reentrant=self.checkpointed)
        y: Tensor = self.head(x)
        return (y, y.square().mean()) if self.with_loss else y


def guarded(model: nn.Module, optimizer: Any, reads: Reads = "immediate", **options: Any) -> Guardian:
    return Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@dataclass
class Halt:
    """What halted, once it has."""

    finding: Finding = field(init=False)


@contextmanager
def halting(guardian: Guardian) -> Iterator[Halt]:
    """A guarded loop that must be halted."""
    halt = Halt()
    with pytest.raises(NonFiniteError) as caught, guardian:
        yield halt
    halt.finding = caught.value.finding


def halt(
    model: nn.Module,
    reads: Reads = "immediate",
    loss_of: Callable[[Any], Tensor] = torch.mean,
    *,
    watched: bool = False,
    batch: Tensor | None = None,
    **options: Any,
) -> Finding:
    """The finding that halts the first step."""
    optimizer = sgd(model)
    guardian = guarded(model, optimizer, reads, **options)
    loss_of = guardian.watch_loss(loss_of) if watched else loss_of
    with halting(guardian) as halted:
        output = model(torch.randn(6, 4) if batch is None else batch)
        (loss_of(output) / 3).backward()
        optimizer.step()
    return halted.finding


def operation(finding: Finding) -> OperationSeen:
    """What the replay has found; it must have found something."""
    assert finding.operation is not None, finding.replay
    return finding.operation


def said(finding: Finding) -> str:
    """What is said of the replay; something must be."""
    assert finding.replay is not None
    return finding.replay


def line(finding: Finding) -> str:
    """The line of code that a finding points to."""
    assert finding.where is not None
    return finding.where.text
