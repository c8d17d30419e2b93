"""LRTracker in real loops: rates that no schedule could mean are told, healthy schedules are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from gpt_guard.callbacks.schedule.guard import LRTracker
from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Moment, Observation, Severity

Make = Callable[[Optimizer], Any]
# SequentialLR itself calls step(0), which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net: nn.Module) -> Tensor:
    x = torch.randn(16, 8)
    return F.mse_loss(net(x), x.sum(1, keepdim=True))


def run(
    make: Make, steps: int = 40, *, every: int = 1, guard: LRTracker | None = None, lr: float = 0.01
) -> list[Finding]:
    """A loop that steps its scheduler after every so many optimizer steps, and goes on where that raises."""
    net = model()
    optimizer = SGD(net.parameters(), lr=lr)
    schedule = make(optimizer)
    guards = [guard or LRTracker()]
    with Guardian(net, optimizer, guards=guards, scheduler=schedule, summary=False, sinks=[]) as guardian:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(net).backward()
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


def factor(of_step: Callable[[int], float]) -> Make:
    return lambda optimizer: schedules.LambdaLR(optimizer, of_step)


def warm_up_and_cosine(step: int) -> float:
    return step / 10 if step < 10 else 0.5 * (1.0 + math.cos(math.pi * (step - 10) / 29))


HEALTHY: dict[str, Make] = {
    "constant": lambda optimizer: schedules.ConstantLR(optimizer, factor=1.0),
    "warm-up from 0, cosine to exactly 0": factor(warm_up_and_cosine),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=39),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.05, total_steps=41),
    "steps": lambda optimizer: schedules.StepLR(optimizer, step_size=10),
    "steps far apart": lambda optimizer: schedules.StepLR(optimizer, step_size=1000),
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, T_0=7),
    "sequence": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=10), schedules.CosineAnnealingLR(optimizer, 30)],
        milestones=[10],
    ),
    "chain": lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.1, total_iters=10), schedules.ExponentialLR(optimizer, 0.99)]
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_schedules_are_quiet(name: str) -> None:
    assert run(HEALTHY[name]) == []


def test_zero_from_the_start_for_longer_than_a_warm_up() -> None:
    (finding,) = run(factor(lambda step: step // 100))
    assert (finding.code, finding.step) == ("GG401", 2)
    assert "from the first step" in finding.seen
    assert "LambdaLR" in finding.seen
    assert "warm-up does not rise" in finding.causes[0]


def test_zero_after_the_end_of_a_schedule() -> None:
    (finding,) = run(factor(lambda step: max(0.0, 1.0 - step / 20)))
    assert (finding.code, finding.step) == ("GG401", 22)
    assert "reached its end" in finding.causes[0]
    assert run(factor(lambda step: max(0.0, 1.0 - step / 20)), guard=LRTracker(zero_steps=21)) == []


def test_two_steps_at_zero_are_no_finding() -> None:
    assert run(factor(lambda step: float(step not in (0, 1, 20, 21)))) == []


def test_groups_at_zero_on_purpose_are_quiet() -> None:
    net = model()
    parameters = list(net.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:]}]
    optimizer = SGD(groups, lr=0.01)
    with Guardian(net, optimizer, guards=[LRTracker()], summary=False, sinks=[]) as guardian:
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    assert not guardian.findings


@pytest.mark.parametrize(
    ("of_step", "step", "cause"),
    [
        (lambda step: 1.0 - step / 20, 21, "below 0 after its last step"),
        (lambda step: math.nan if step >= 4 else 1.0, 4, "division by zero"),
        (lambda step: math.inf if step >= 4 else 1.0, 4, "division by zero"),
    ],
)
def test_impossible_rates(of_step: Callable[[int], float], step: int, cause: str) -> None:
    finding = run(factor(of_step), steps=step + 2)[0]
    assert (finding.code, finding.step, finding.severity) == ("GG402", step, Severity.ERROR)
    assert cause in finding.causes[0]
    assert "group 0" in finding.seen


class Rateless(Optimizer):
    """An optimizer whose groups have no lr."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure is used here
        """Sign descent."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data.sub_(1e-3 * parameter.grad.sign())


def test_an_optimizer_without_lr_is_quiet() -> None:
    net = model()
    optimizer = Rateless(net)
    with Guardian(net, optimizer, guards=[LRTracker()], summary=False, sinks=[]) as guardian:
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    assert not guardian.findings


def spiking(schedule: Make, at: int, *, steps: int = 120, clip: float | None = None) -> list[Finding]:
    """The gradient of one step is a thousand times too large; its update is small, so that the run goes on."""
    net = model()
    optimizer = SGD(net.parameters(), lr=1e-4)
    scheduler = schedule(optimizer)
    with Guardian(net, optimizer, guards=[LRTracker()], summary=False, sinks=[]) as guardian:
        for step in range(steps):
            optimizer.zero_grad()
            (loss_of(net) * (1000.0 if step == at else 1.0)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            scheduler.step()
    return list(guardian.findings)


def test_a_spike_at_the_peak_is_told_and_one_elsewhere_is_not() -> None:
    def triangle(step: int) -> float:
        return (step + 1) / 60 if step < 60 else max(0.05, 2.0 - step / 60)

    (finding,) = spiking(factor(triangle), at=60)
    assert (finding.code, finding.step, finding.severity) == ("GG408", 60, Severity.WARNING)
    assert "peak learning rate" in finding.causes[0]
    assert spiking(factor(triangle), at=100) == []


def test_a_spike_that_clipping_contained_is_information() -> None:
    (finding,) = spiking(factor(lambda step: min(1.0, step / 60)), at=61, clip=1.0)
    assert (finding.code, finding.severity) == ("GG408", Severity.INFO)


def test_a_spike_long_after_warm_up_or_at_a_constant_rate_is_no_matter_of_the_schedule() -> None:
    assert spiking(factor(lambda step: min(1.0, step / 20)), at=110) == []
    assert spiking(factor(lambda step: 1.0), at=60) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"expected": "cosine"},
        {"expected": 0.1},
        {"rtol": -1.0},
        {"zero_steps": 1},
        {"unstepped_after": 1},
        {"jump_factor": 1.0},
        {"restart_factor": 0.5},
        {"spike_factor": 1.0},
        {"least": 1},
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(GuardUsageError, match=next(iter(arguments))):
        LRTracker(**arguments)  # type: ignore[arg-type]  # that is the point


def test_wild_rates_and_norms_without_a_scheduler_are_each_told_once() -> None:
    net, guard = model(), LRTracker()
    optimizer = SGD(net.parameters(), lr=0.01)
    wild = {40: 0.0, 41: math.nan, 42: math.nan, 43: -1.0, 50: 0.0, 51: 0.0, 52: 0.0}
    found: dict[int, list[str]] = {}
    with Guardian(net, optimizer, guards=[guard], sinks=[]):
        for step in range(120):
            lr = wild.get(step, 0.001 * (step + 1) if step < 20 else 0.02 if step < 80 else 1e-10)
            norm = {35: 1e3, 45: math.nan, 46: 0.0}.get(step, 1.0 + 0.1 * math.sin(step))
            seen = Observation(step=step, moment=Moment.BEFORE_STEP, loss=1.0, lr=(lr,), grad_norm=norm)
            if codes := [each.code for each in guard.judge(seen)]:
                found[step] = codes
    assert found == {35: ["GG408"], 41: ["GG402"], 42: ["GG402"], 43: ["GG402"], 52: ["GG401"], 89: ["GG409"]}


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
    optimizer = SGD(net.parameters(), lr=0.01)
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
