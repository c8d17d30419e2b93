"""A scheduler of another optimizer over the same parameters, which nobody gave to Guardian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedules

from gpt_guard import Guardian, LRTracker
from gpt_guard.records import Finding

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def run(make: Callable[[nn.Module], tuple[Optimizer, Any, Any]], steps: int = 8) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, scheduler, other = make(model)
    with Guardian(model, optimizer, guards=[LRTracker()], sinks=[]) as guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if other is not None:
                other.step()
            scheduler.step()
    assert other is None or not isinstance(other, Optimizer) or not other._optimizer_step_post_hooks
    return list(guardian.findings)


def made_again(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    old = SGD(model.parameters(), lr=0.1)
    return SGD(model.parameters(), lr=0.1, momentum=0.9), schedules.ExponentialLR(old, 0.5), None


def of_another_kind(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    old = SGD(model.parameters(), lr=0.1)
    return Adam(model.parameters(), lr=0.1), schedules.LinearLR(old, 0.1, total_iters=20), None


def in_sequence(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    old = SGD([model.get_parameter("weight")], lr=0.1)
    first, then = schedules.ConstantLR(old, 0.5, 4), schedules.ExponentialLR(old, 0.9)
    return SGD(model.parameters(), lr=0.1), schedules.SequentialLR(old, [first, then], [4]), None


@pytest.mark.parametrize("make", [made_again, of_another_kind, in_sequence])
def test_it_is_told_with_both_rates(make: Any) -> None:
    (found,) = run(make)
    assert found.code == "GG404"
    assert "still has 1.0e-01" in found.seen
    assert "made again" in found.causes[0]
    assert found.step in (3, 4, 5, 6)


def its_own(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    optimizer = SGD(model.parameters(), lr=0.1)
    return optimizer, schedules.ExponentialLR(optimizer, 0.5), None


def of_other_parameters(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    other = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return SGD(model.parameters(), lr=0.1), schedules.ExponentialLR(other, 0.5), None


def both_step(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    other = SGD(model.parameters(), lr=0.1)
    return SGD(model.parameters(), lr=0.1), schedules.ExponentialLR(other, 0.5), other


class Around(Optimizer):
    """Steps another optimizer, with whose groups it works, as SAM and Lookahead do."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([each for group in base.param_groups for each in group["params"]], {"lr": 0.1})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        self.base.step()


def wrapped(model: nn.Module) -> tuple[Optimizer, Any, Any]:
    base = SGD(model.parameters(), lr=0.1)
    return Around(base), schedules.ExponentialLR(base, 0.5), None


@pytest.mark.parametrize("make", [its_own, of_other_parameters, both_step, wrapped])
def test_a_scheduler_that_does_what_it_should_is_silent(make: Any) -> None:
    assert run(make) == []
