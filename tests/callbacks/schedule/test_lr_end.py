"""LRTracker on schedules that die, or end, before the run does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim import lr_scheduler as schedules

from gpt_guard.callbacks.schedule.lr import LRTracker
from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

Make = Callable[[Optimizer], Any]
# SequentialLR itself calls step(0), which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter")


def run(make: Make, steps: int, *, every: int = 1, lr: float = 0.01, guard: LRTracker | None = None) -> list[Finding]:
    """A loop that steps its scheduler after every so many optimizer steps, and goes on where that raises."""
    net = nn.Linear(2, 1)
    optimizer = Adam(net.parameters(), lr=lr)
    schedule = make(optimizer)
    x = Tensor([[1.0, 2.0]])
    with Guardian(net, optimizer, guards=[guard or LRTracker()], scheduler=schedule, sinks=[]) as guardian:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            F.mse_loss(net(x), x[:, :1]).backward()
            optimizer.step()
            if step % every == 0:
                move(schedule)
    return list(guardian.findings)


def move(schedule: Any) -> None:
    try:
        schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    except ValueError:
        # As one writes it who only wants the run to go on.
        return


def cosine(length: int, **options: Any) -> Make:
    return lambda optimizer: schedules.CosineAnnealingLR(optimizer, length, **options)


# GG409: it has all but vanished.


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda optimizer: schedules.ExponentialLR(optimizer, 0.7), 39),
        (lambda optimizer: schedules.StepLR(optimizer, 3, 0.1), 21),
    ],
)
def test_a_decay_that_is_over_long_before_the_run(make: Make, first: int) -> None:
    (found,) = run(make, 150)
    assert (found.code, found.severity, found.step) == ("GG409", Severity.WARNING, first + 9)
    assert "times its peak of 1.0e-02" in found.seen
    assert f"stands at position {first + 9}" in found.seen
    assert "stepped once per batch" in found.causes[0]


def test_the_same_decay_once_an_epoch_is_quiet() -> None:
    assert run(lambda optimizer: schedules.ExponentialLR(optimizer, 0.7), 150, every=10) == []


def test_the_share_can_be_set() -> None:
    def make(optimizer: Optimizer) -> Any:
        return schedules.ExponentialLR(optimizer, 0.7)

    assert run(make, 60, guard=LRTracker(vanishing=0.0)) == []
    (found,) = run(make, 60, guard=LRTracker(vanishing=1e-3))
    assert (found.code, found.step) == ("GG409", 29)
    with pytest.raises(GuardUsageError, match="vanishing"):
        LRTracker(vanishing=1.0)


def test_a_decay_that_is_expected_is_quiet() -> None:
    guard = LRTracker(expected=lambda step: 0.01 * 0.7**step)
    assert run(lambda optimizer: schedules.ExponentialLR(optimizer, 0.7), 60, guard=guard) == []


def test_a_plateau_that_has_converged_is_worth_knowing() -> None:
    (found,) = run(lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.1, patience=1, eps=0.0), 60)
    assert (found.code, found.severity) == ("GG409", Severity.INFO)
    assert "ReduceLROnPlateau has lowered it" in found.causes[0]


def test_it_is_said_once_when_the_rate_then_becomes_zero() -> None:
    def make(optimizer: Optimizer) -> Any:
        return schedules.LambdaLR(optimizer, lambda step: 0.1**step if step < 30 else 0.0)

    assert [found.code for found in run(make, 60)] == ["GG409"]


# GG410: past its end.


def test_a_cosine_counted_in_epochs_and_stepped_per_batch() -> None:
    (found,) = run(cosine(10), 200)
    assert (found.code, found.severity, found.step) == ("GG410", Severity.WARNING, 13)
    assert "CosineAnnealingLR stands at position 13; it was made for 10" in found.seen
    assert "stepped per batch" in found.causes[0]


def test_a_cosine_over_fewer_epochs_than_the_run_is_worth_knowing() -> None:
    (found,) = run(cosine(10, eta_min=1e-4), 200, every=10)
    assert (found.code, found.severity, found.step) == ("GG410", Severity.INFO, 130)


def test_one_cycle_that_ends_before_the_run() -> None:
    (found,) = run(lambda optimizer: schedules.OneCycleLR(optimizer, 0.01, total_steps=50), 150)
    assert (found.code, found.step) == ("GG410", 57)


def test_the_last_part_of_a_sequence_counts() -> None:
    def make(optimizer: Optimizer) -> Any:
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=5), schedules.CosineAnnealingLR(optimizer, 20)]
        return schedules.SequentialLR(optimizer, parts, milestones=[5])

    assert run(make, 27) == []
    (found,) = run(make, 80)
    assert (found.code, found.step) == ("GG410", 29)


# The healthy twins.


def warm_up(optimizer: Optimizer) -> Any:
    parts = [schedules.ConstantLR(optimizer, 1e-7, total_iters=20), schedules.LinearLR(optimizer, 1e-7, total_iters=20)]
    return schedules.SequentialLR(optimizer, parts, milestones=[20])


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (cosine(200), 200),
        (cosine(200), 215),
        (lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1.0 - step / 199), 200),
        # 31 steps below a millionth of the peak.
        (lambda optimizer: schedules.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / 3001) ** 3), 3000),
        (lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 10), 200),
        (lambda optimizer: schedules.OneCycleLR(optimizer, 0.01, total_steps=200), 200),
        (lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=20), 100),
        (warm_up, 100),
        (lambda optimizer: schedules.LinearLR(optimizer, 0.1, total_iters=10), 200),
    ],
)
def test_schedules_that_end_with_the_run_are_quiet(make: Make, steps: int) -> None:
    assert run(make, steps) == []


def test_a_length_that_was_loaded_counts() -> None:
    net = nn.Linear(2, 1)
    optimizer = Adam(net.parameters(), lr=0.01)
    schedule = schedules.CosineAnnealingLR(optimizer, 10)
    with Guardian(net, optimizer, guards=[LRTracker()], scheduler=schedule, sinks=[]) as guardian:
        schedule.T_max = 100
        for _ in range(90):
            optimizer.zero_grad()
            net(Tensor([[1.0, 2.0]])).sum().backward()
            optimizer.step()
            schedule.step()
    assert list(guardian.findings) == []
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.005 * (1 + math.cos(0.9 * math.pi)), rel_tol=1e-6)
