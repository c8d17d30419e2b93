"""The learning rate over a resume, and against the schedule that the user expects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from gpt_guard.callbacks.schedule.guard import LRTracker
from gpt_guard.callbacks.schedule.rates import ExpectedLR
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

Make = Callable[[Optimizer], schedules.LRScheduler]


class Run:
    """A model, its optimizer and scheduler, and a loop over them."""

    def __init__(self, make: Make, lr: float = 0.01) -> None:
        self.net = nn.Linear(4, 1)
        self.optimizer = SGD(self.net.parameters(), lr=lr)
        self.scheduler = make(self.optimizer)

    def go(self, guard: LRTracker, steps: int, *, start: int = 0, given: bool = True) -> list[Finding]:
        how: dict[str, Any] = {"scheduler": self.scheduler} if given else {}
        guardian = Guardian(self.net, self.optimizer, guards=[guard], start_step=start, summary=False, sinks=[], **how)
        with guardian:
            self.loop(steps)
        return list(guardian.findings)

    def loop(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()


def resumed(make: Make, steps: int, *, load: bool, lr: float = 0.01, given: bool = True) -> list[Finding]:
    """Train, save, build everything again, load or forget the scheduler's state, and train on."""
    before, guard = Run(make), LRTracker()
    assert before.go(guard, steps, given=given) == []
    state = json.loads(json.dumps(guard.state_dict()))
    after, again = Run(make, lr), LRTracker()
    if load:
        after.optimizer.load_state_dict(before.optimizer.state_dict())
        after.scheduler.load_state_dict(before.scheduler.state_dict())
    again.load_state_dict(state)
    return after.go(again, 10, start=steps, given=given)


def warm_up(optimizer: Optimizer) -> schedules.LRScheduler:
    return schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))


def by_steps(optimizer: Optimizer) -> schedules.LRScheduler:
    return schedules.StepLR(optimizer, step_size=30)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("make", "steps"), [(warm_up, 40), (warm_up, 1), (by_steps, 30), (by_steps, 29)])
def test_a_schedule_that_goes_on_is_quiet(make: Make, steps: int, given: bool) -> None:
    assert resumed(make, steps, load=True, given=given) == []


def test_a_schedule_that_starts_again_is_told() -> None:
    (finding,) = resumed(warm_up, 40, load=False)
    assert (finding.code, finding.step) == ("GG407", 40)
    assert finding.evidence["factor"] == pytest.approx(1 / 40)
    assert "at step 39" in finding.seen
    assert "starts at position 0 again" in finding.causes[0]


def cosine(optimizer: Optimizer) -> schedules.LRScheduler:
    return schedules.CosineAnnealingLR(optimizer, 100)


def test_a_schedule_that_starts_again_is_told_by_less_than_a_jump() -> None:
    (finding,) = resumed(cosine, 40, load=False)
    assert (finding.code, finding.step) == ("GG407", 40)
    assert finding.evidence["factor"] == pytest.approx(1.5, abs=0.1)
    assert "starts at position 0 again" in finding.causes[0]


@pytest.mark.parametrize("steps", [2, 40, 90])
def test_a_cosine_that_goes_on_is_quiet(steps: int) -> None:
    assert resumed(cosine, steps, load=True) == []


def test_a_second_phase_with_a_rate_of_its_own_is_quiet() -> None:
    assert resumed(cosine, 40, load=False, lr=0.005) == []


def test_another_rate_is_told() -> None:
    (finding,) = resumed(by_steps, 20, load=False, lr=0.05)
    assert finding.code == "GG407"
    assert finding.evidence["factor"] == pytest.approx(5.0)
    assert "load_state_dict" in finding.causes[0]
    assert resumed(by_steps, 20, load=False, lr=0.015) == []


def test_entering_again_is_a_resume_of_the_same_optimizer_only() -> None:
    guard, run = LRTracker(), Run(by_steps)
    guardian = Guardian(run.net, run.optimizer, guards=[guard], summary=False, sinks=[])
    with guardian:
        run.loop(5)
    with guardian:
        run.loop(5)
    assert not guardian.findings
    run.optimizer.param_groups[0]["lr"] = 0.5
    with guardian:
        run.loop(1)
    assert [(f.code, f.step) for f in guardian.findings] == [("GG407", 10)]
    assert Run(by_steps, lr=7.0).go(guard, 5) == []


def test_state_is_small_and_plain() -> None:
    guard = LRTracker()
    Run(by_steps).go(guard, 200)
    state = guard.state_dict()
    copy = LRTracker()
    copy.load_state_dict(json.loads(json.dumps(state)))
    assert copy.state_dict() == state
    assert len(json.dumps(state)) < 5000


def test_the_expected_schedule_is_quiet_as_function_and_as_list() -> None:
    def expected(step: int) -> float:
        return 0.01 * min(1.0, (step + 1) / 50)

    assert Run(warm_up).go(LRTracker(expected), 60) == []
    assert Run(warm_up).go(LRTracker([expected(step) for step in range(30)]), 60) == []


def test_the_first_step_off_the_expected_schedule_is_told_with_both_values() -> None:
    (finding,) = Run(warm_up).go(LRTracker(lambda step: 0.01 * min(1.0, (step + 1) / 40)), 60)
    assert (finding.code, finding.step) == ("GG406", 0)
    assert finding.evidence["lr"] == pytest.approx([0.0002])
    assert finding.evidence["expected"] == pytest.approx([0.00025])


def test_a_schedule_read_one_step_early_is_told_as_such() -> None:
    (finding,) = Run(warm_up).go(LRTracker(lambda step: 0.01 * min(1.0, step / 50)), 60)
    assert finding.evidence["shift"] == 1
    assert "one step early or late" in finding.causes[0]


def test_each_group_has_an_expectation_of_its_own() -> None:
    net = nn.Linear(4, 1)
    groups: list[dict[str, Any]] = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.03}]
    optimizer = SGD(groups, lr=0.01)
    with Guardian(net, optimizer, guards=[LRTracker([(0.01, 0.02)] * 5)], summary=False, sinks=[]) as guardian:
        for _ in range(3):
            net(torch.randn(8, 4)).sum().backward()
            optimizer.step()
    (finding,) = guardian.findings
    assert (finding.code, finding.evidence["group"]) == ("GG406", 1)


def test_a_zero_that_is_expected_is_quiet() -> None:
    off = Run(lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.0))
    assert off.go(LRTracker(lambda step: 0.0), 10) == []


def test_rounding_is_no_difference() -> None:
    expected = ExpectedLR([0.1, 0.0], rtol=1e-6)
    assert expected.matches((0.1 * (1 + 1e-7),), (0.1,))
    assert expected.matches((1e-20,), (0.0,))
    assert not expected.matches((0.1 * (1 + 1e-5),), (0.1,))
    assert not expected.matches((1e-6,), (0.0,))
    assert expected.at(5, 1) is None
