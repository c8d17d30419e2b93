"""Schedulers seen from outside: one that stands still, runs too fast, is overruled, or drives something else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from gpt_guard.callbacks.schedule.guard import LRTracker
from gpt_guard.callbacks.schedule.schedulers import last_lr, position, unwrapped
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Moment, Report

# A scheduler that never steps, or steps at the wrong time, is the subject here; torch itself warns of some of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The epoch parameter"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
]

given_or_found = pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
After = Callable[[Any, Optimizer, int], None]


def linear(optimizer: Optimizer) -> schedules.LRScheduler:
    return schedules.LinearLR(optimizer, 0.1, total_iters=1000)


def chain(optimizer: Optimizer) -> schedules.ChainedScheduler:
    return schedules.ChainedScheduler([linear(optimizer), schedules.ExponentialLR(optimizer, 0.999)])


def sequence(optimizer: Optimizer) -> schedules.SequentialLR:
    return schedules.SequentialLR(optimizer, [linear(optimizer), schedules.ExponentialLR(optimizer, 0.99)], [10])


def run(
    make: Callable[[Optimizer], Any],
    after: After,
    *,
    given: bool = True,
    steps: int = 40,
    micro_batches: int = 1,
    foreign: bool = False,
    per_micro_batch: bool = False,
) -> tuple[list[Finding], Report]:
    net = nn.Linear(4, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    scheduler = make(SGD(net.parameters(), lr=0.01) if foreign else optimizer)
    how: dict[str, Any] = {"scheduler": scheduler} if given else {}
    with Guardian(net, optimizer, guards=[LRTracker()], summary=False, sinks=[], **how) as guardian:
        for step in range(steps):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                x = torch.randn(8, 4)
                (F.mse_loss(net(x), x.sum(1, keepdim=True)) / micro_batches).backward()
                if per_micro_batch:
                    scheduler.step()
            optimizer.step()
            after(scheduler, optimizer, step)
    return list(guardian.findings), guardian.report()


def never(_scheduler: Any, _optimizer: Optimizer, _step: int) -> None:
    pass


def once(scheduler: Any, _optimizer: Optimizer, _step: int) -> None:
    scheduler.step()


def twice(scheduler: Any, _optimizer: Optimizer, _step: int) -> None:
    scheduler.step()
    scheduler.step()


@given_or_found
@pytest.mark.parametrize("make", [linear, chain, sequence])
def test_stepped_once_it_is_quiet(make: Callable[[Optimizer], Any], given: bool) -> None:
    findings, report = run(make, once, given=given)
    assert findings == []
    assert not [spot for spot in report.not_watched if spot.startswith("LRTracker")]


@given_or_found
@pytest.mark.parametrize("make", [linear, chain, sequence])
def test_never_stepped_is_told_at_the_end(make: Callable[[Optimizer], Any], given: bool) -> None:
    (finding,), _ = run(make, never, given=given)
    assert (finding.code, finding.moment) == ("GG403", Moment.EXIT)
    assert finding.evidence["steps"] == 40
    assert "scheduler.step() is never called" in finding.causes[0]
    assert ("was not given" in finding.seen) is not given


def test_a_short_run_is_not_judged() -> None:
    assert run(linear, never, steps=19)[0] == []


def test_a_run_that_ends_by_an_exception_is_not_judged() -> None:
    net = nn.Linear(4, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    scheduler = schedules.StepLR(optimizer, 1)
    guardian = Guardian(net, optimizer, guards=[LRTracker()], scheduler=scheduler, summary=False, sinks=[])

    def interrupted() -> None:
        with guardian:
            for _ in range(30):
                net(torch.randn(8, 4)).sum().backward()
                optimizer.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not guardian.findings


@given_or_found
@pytest.mark.parametrize("epoch", [10, 40])
def test_stepped_once_an_epoch_is_quiet(epoch: int, given: bool) -> None:
    def by_epoch(scheduler: Any, _optimizer: Optimizer, step: int) -> None:
        if (step + 1) % epoch == 0:
            scheduler.step()

    assert run(lambda optimizer: schedules.StepLR(optimizer, 1), by_epoch, given=given)[0] == []


def test_plateau_is_quiet_whether_it_has_had_its_turn_or_not() -> None:
    def validate(scheduler: Any, _optimizer: Optimizer, step: int) -> None:
        if step % 10 == 9:
            scheduler.step(1.0)

    assert run(lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=1), validate)[0] == []
    assert run(schedules.ReduceLROnPlateau, never)[0] == []


@given_or_found
def test_overruled_by_the_loop_is_told(given: bool) -> None:
    def overrule(scheduler: Any, optimizer: Optimizer, _step: int) -> None:
        scheduler.step()
        optimizer.param_groups[0]["lr"] = 0.005

    (finding,), _ = run(lambda optimizer: schedules.CosineAnnealingLR(optimizer, 100), overrule, given=given)
    assert finding.code == "GG403"
    assert "writes the lr back" in finding.causes[0]
    assert "5.0e-03" in finding.seen


def test_another_optimizer_is_told_at_the_first_step() -> None:
    findings, _ = run(linear, once, foreign=True)
    assert [(f.code, f.step) for f in findings] == [("GG404", 0)]


@given_or_found
@pytest.mark.parametrize("make", [linear, chain, sequence])
def test_two_steps_for_one_are_told(make: Callable[[Optimizer], Any], given: bool) -> None:
    (finding,), _ = run(make, twice, given=given)
    assert (finding.code, finding.step) == ("GG405", 3)
    assert finding.evidence["moved"] == 2
    assert "two places" in finding.causes[0]


def test_a_step_for_each_micro_batch_is_told_as_such() -> None:
    (finding,), _ = run(linear, never, micro_batches=4, per_micro_batch=True)
    assert (finding.code, finding.evidence["moved"]) == ("GG405", 4)
    assert "each micro-batch" in finding.causes[0]
    assert run(linear, once, micro_batches=4)[0] == []


def test_steps_that_a_scaler_skips_are_no_reason() -> None:
    net = nn.Linear(4, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    scheduler = linear(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Guardian(net, optimizer, guards=[LRTracker()], scheduler=scheduler, summary=False, sinks=[]) as guardian:
        for step in range(30):
            optimizer.zero_grad()
            loss = net(torch.randn(8, 4)).sum() * (float("inf") if step % 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert guardian.report().skipped_steps == 20
    assert not guardian.findings


def test_a_scheduler_that_was_found_is_not_kept_alive() -> None:
    net = nn.Linear(4, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    scheduler: Any = linear(optimizer)
    alive = weakref.ref(scheduler)
    with Guardian(net, optimizer, guards=[LRTracker()], summary=False, sinks=[]) as guardian:
        for step in range(30):
            net(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            if step == 5:
                del scheduler
                gc.collect()
                assert alive() is None
    assert not guardian.findings


def test_a_mark_without_a_live_scheduler_is_named_as_not_watched() -> None:
    net = nn.Linear(4, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    linear(optimizer)
    gc.collect()
    with Guardian(net, optimizer, guards=[LRTracker()], summary=False, sinks=[]) as guardian:
        net(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert any("scheduler of optimizer 0" in spot for spot in guardian.report().not_watched)


def test_a_scheduler_of_its_own_kind_is_named_as_not_counted() -> None:
    class Own:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            """Counts nothing."""

    findings, report = run(Own, never)
    assert findings == []
    assert any("Own" in spot for spot in report.not_watched)


def test_what_is_read_from_a_scheduler() -> None:
    optimizer = SGD(nn.Linear(4, 1).parameters(), lr=0.01)
    scheduler = linear(optimizer)

    class Wrapper:
        def __init__(self, inner: object) -> None:
            self.scheduler = inner

    assert unwrapped(Wrapper(scheduler)) is scheduler
    assert unwrapped({"scheduler": scheduler, "interval": "step"}) is scheduler
    assert position(scheduler) == 0
    assert position(object()) is None
    assert last_lr(scheduler) == pytest.approx((0.001,))
    assert last_lr(object()) is None


# Two optimizers and two schedulers: both made from the same optimizer, or each from its own.

Make = Callable[[Optimizer], Any]


def by_steps(optimizer: Optimizer) -> Any:
    return schedules.StepLR(optimizer, step_size=2, gamma=0.5)


def slower(optimizer: Optimizer) -> Any:
    return schedules.StepLR(optimizer, step_size=4, gamma=0.5)


def cosine(optimizer: Optimizer) -> Any:
    return schedules.CosineAnnealingLR(optimizer, 50)


def by_function(optimizer: Optimizer) -> Any:
    return schedules.LambdaLR(optimizer, lambda step: 0.9**step)


def run_two(one: Make, other: Make, *, same: bool, given: bool = True) -> list[Finding]:
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
    (found,) = run_two(make, make, same=True)
    assert (found.code, found.step) == ("GG404", 0)
    assert found.evidence == {
        "scheduler": type(make(SGD([torch.ones(1)], lr=1.0))).__name__,
        "optimizer": 0,
        "without": 1,
    }
    assert "both with the same" in found.causes[0]


@pytest.mark.parametrize("make", [by_steps, cosine])
def test_one_for_each_is_silent(make: Make) -> None:
    assert run_two(make, make, same=False) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [(by_steps, slower), (by_steps, cosine), (by_function, by_function)],
    ids=["steps and slower", "steps and cosine", "functions"],
)
def test_two_that_may_be_chained_are_silent(one: Make, other: Make) -> None:
    assert run_two(one, other, same=True) == []


def test_one_that_may_be_left_over_is_silent() -> None:
    assert run_two(by_steps, by_steps, same=True, given=False) == []
