"""Two optimizers and two schedulers: both made from the same optimizer, or each from its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from gpt_guard.callbacks.schedule.lr import LRTracker
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

Make = Callable[[Optimizer], Any]


def by_steps(optimizer: Optimizer) -> Any:
    return schedules.StepLR(optimizer, step_size=2, gamma=0.5)


def slower(optimizer: Optimizer) -> Any:
    return schedules.StepLR(optimizer, step_size=4, gamma=0.5)


def cosine(optimizer: Optimizer) -> Any:
    return schedules.CosineAnnealingLR(optimizer, 50)


def by_function(optimizer: Optimizer) -> Any:
    return schedules.LambdaLR(optimizer, lambda step: 0.9**step)


def train(one: Make, other: Make, *, same: bool, given: bool = True) -> list[Finding]:
    net = nn.ModuleDict({"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 2)})
    actor, critic = (SGD(net[name].parameters(), lr=0.01) for name in ("actor", "critic"))
    both = [one(actor), other(actor if same else critic)]
    how: dict[str, Any] = {"scheduler": both} if given else {}
    with Guardian(net, [actor, critic], guards=[LRTracker()], summary=False, sinks=[], **how) as guardian:
        for _ in range(6):
            x = torch.randn(8, 4)
            for name, optimizer in (("actor", actor), ("critic", critic)):
                optimizer.zero_grad()
                net[name](x).square().mean().backward()
                optimizer.step()
            for scheduler in both:
                scheduler.step()
    return list(guardian.findings)


@pytest.mark.parametrize("make", [by_steps, cosine])
def test_two_equal_ones_on_one_optimizer_are_told_in_the_first_step(make: Make) -> None:
    (found,) = train(make, make, same=True)
    assert (found.code, found.step) == ("GG404", 0)
    assert found.evidence == {
        "scheduler": type(make(SGD([torch.ones(1)], lr=1.0))).__name__,
        "optimizer": 0,
        "without": 1,
    }
    assert "both with the same" in found.causes[0]


@pytest.mark.parametrize("make", [by_steps, cosine])
def test_one_for_each_is_silent(make: Make) -> None:
    assert train(make, make, same=False) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [(by_steps, slower), (by_steps, cosine), (by_function, by_function)],
    ids=["steps and slower", "steps and cosine", "functions"],
)
def test_two_that_may_be_chained_are_silent(one: Make, other: Make) -> None:
    assert train(one, other, same=True) == []


def test_one_that_may_be_left_over_is_silent() -> None:
    assert train(by_steps, by_steps, same=True, given=False) == []
