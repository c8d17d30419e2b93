"""A schedule that begins again in the middle of a run is told by the new scheduler that stands at its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    OneCycleLR,
    StepLR,
)

from gpt_guard.callbacks.schedule.guard import LRTracker
from gpt_guard.records import Severity

from ..loop_order.order_loops import cross_entropy, run


def warm_up(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda at: min(at, 10 - at) / 5 + 0.01)


def cosine_from_the_start(optimizer: Any) -> CosineAnnealingLR:
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    return CosineAnnealingLR(optimizer, 10)


def loop(make: Callable[[Any], Any], every: int) -> Callable[..., None]:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        if step % every == 0:
            kept["scheduler"] = make(optimizer)
        optimizer.zero_grad()
        cross_entropy(model).backward()
        optimizer.step()
        kept["scheduler"].step()

    return body


def long_cosine_from_the_start(optimizer: Any) -> CosineAnnealingLR:
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    return CosineAnnealingLR(optimizer, 30)


@pytest.mark.parametrize("make", [warm_up, cosine_from_the_start, long_cosine_from_the_start])
def test_a_scheduler_made_in_each_epoch(make: Callable[[Any], Any]) -> None:
    found = run(loop(make, 8), steps=20, guards=[LRTracker()])
    assert [(each.code, each.step, each.severity) for each in found] == [
        ("GG412", 8, Severity.INFO),
        ("GG412", 16, Severity.WARNING),
    ]
    assert "inside the epoch loop" in found[0].causes[0]
    assert found[0].evidence["position"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 5),
        lambda optimizer: CyclicLR(optimizer, 0.005, 0.05, step_size_up=3),
        lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=60),
        lambda optimizer: StepLR(optimizer, 7, gamma=0.1),
        lambda optimizer: LambdaLR(optimizer, lambda at: 1.0 if at % 6 == 0 else 0.2),
    ],
    ids=["warm restarts", "cyclic", "one cycle", "steps", "function with a period"],
)
def test_schedules_that_are_meant_to_rise_are_silent(make: Callable[[Any], Any]) -> None:
    assert run(loop(make, 1000), steps=40, guards=[LRTracker()]) == []


def test_the_factor_can_be_set() -> None:
    assert run(loop(long_cosine_from_the_start, 8), steps=20, guards=[LRTracker(restart_factor=2.0)]) == []


def test_a_rate_that_is_put_back_by_hand_is_silent() -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step % 6 == 0 else 0.01
        optimizer.zero_grad()
        cross_entropy(model).backward()
        optimizer.step()

    assert run(body, steps=20, guards=[LRTracker()]) == []
