"""Guards of the user's own: called at their moments, checked when defined, switched off when they fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite.guard import FiniteGuard
from gpt_guard.errors import NonFiniteError
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity


class LossSpike(Guard):
    """As a user writes it: one class, judging floats."""

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor
        self.last: float | None = None

    def judge(self, seen: Observation) -> Iterable[Finding]:
        if self.last is not None and seen.loss is not None and seen.loss > self.factor * self.last:
            yield Finding(
                code="MY1", title="Loss spike", severity=Severity.WARNING, seen=f"{seen.loss}", step=seen.step
            )
        self.last = seen.loss


class Measuring(Guard):
    """Puts a number of its own into the ledger at each moment."""

    judged_at = frozenset({Moment.BEFORE_STEP, Moment.AFTER_STEP})

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def before_backward(self, loss: Tensor) -> None:
        self.watch.ledger.put("mine.loss", loss * 2)

    def after_backward(self) -> None:
        self.watch.ledger.put("mine.micro", float(self.watch.micro_batch))

    def before_step(self, optimizer: Optimizer) -> None:
        self.watch.ledger.put("mine.before", next(self.watch.model.parameters()).sum())

    def after_step(self, optimizer: Optimizer) -> None:
        self.watch.ledger.put("mine.after", next(self.watch.model.parameters()).sum())

    def judge(self, seen: Observation) -> Iterable[Finding]:
        self.seen.append({"step": seen.step, "moment": seen.moment, **seen.readings})
        return ()


class Failing(Guard):
    """Fails at one moment; everything else must go on."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.calls: list[str] = []

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.at:
            raise ZeroDivisionError(f"a bug in {name}")

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        watch.forward_begins.append(self._forward_begins)
        watch.forward_ended.append(self._forward_ended)
        self._note("attach")

    def detach(self) -> None:
        super().detach()
        self._note("detach")

    def _forward_begins(self) -> None:
        self._note("forward_begins")

    def _forward_ended(self, output: Any) -> None:
        self._note("forward_ended")

    def before_backward(self, loss: Tensor) -> None:
        self._note("before_backward")

    def after_backward(self) -> None:
        self._note("after_backward")

    def before_step(self, optimizer: Optimizer) -> None:
        self._note("before_step")

    def after_step(self, optimizer: Optimizer) -> None:
        self._note("after_step")

    def judge(self, seen: Observation) -> Iterable[Finding]:
        self._note("judge")
        return ()

    def finish(self) -> Iterable[Finding]:
        self._note("finish")
        return ()

    def blind_spots(self) -> Iterable[str]:
        self._note("blind_spots")
        return ()

    def fingerprint(self) -> dict[str, str]:
        self._note("fingerprint")
        return {}


MOMENTS = [
    "attach",
    "forward_begins",
    "forward_ended",
    "before_backward",
    "after_backward",
    "before_step",
    "after_step",
    "judge",
    "finish",
    "detach",
]


def setup() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3, scale: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(4, 2)).pow(2).mean() * scale).backward()
        optimizer.step()


def test_a_guard_of_ones_own() -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, guards=[LossSpike()], sinks=[]) as guardian:
        train(model, optimizer)
        train(model, optimizer, 1, scale=100.0)
    (found,) = guardian.findings
    assert (found.code, found.step, found.guard) == ("MY1", 3, "LossSpike")
    assert len(found.history) == 3
    assert found.last_healthy is not None
    assert found.last_healthy.step == 2


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_numbers_come_back_under_the_step_they_were_measured_in(reads: Any) -> None:
    model, optimizer = setup()
    guard = Measuring()
    weights = []
    with Guardian(model, optimizer, guards=[guard], sinks=[], reads=reads) as guardian:
        for _ in range(2):
            weights.append(next(model.parameters()).sum().item())
            train(model, optimizer, 1)
            assert guardian.latest is not None
            loss = guardian.latest.loss
    weights.append(next(model.parameters()).sum().item())
    before = [each for each in guard.seen if each["moment"] is Moment.BEFORE_STEP]
    after = [each for each in guard.seen if each["moment"] is Moment.AFTER_STEP]
    assert [each["step"] for each in before] == [each["step"] for each in after] == [0, 1]
    assert [each["mine.before"] for each in before] == pytest.approx(weights[:2])
    assert [each["mine.after"] for each in after] == pytest.approx(weights[1:])
    assert before[1]["mine.loss"] == pytest.approx(2 * (loss or 0.0))
    assert before[1]["mine.micro"] == 1.0


@pytest.mark.parametrize("at", MOMENTS)
def test_a_guard_that_fails_is_named_and_switched_off(at: str) -> None:
    model, optimizer = setup()
    guard, other = Failing(at), Measuring()
    with Guardian(model, optimizer, guards=[guard, other], sinks=[]) as guardian:
        train(model, optimizer)
    (found,) = guardian.findings
    assert (found.code, found.guard) == ("GG906", "Failing")
    assert f"ZeroDivisionError: a bug in {at}" in found.seen
    assert "test_guard_runner.py" in found.seen
    assert guard.calls.count(at) == 1
    assert guardian.step == 3
    assert len(other.seen) == 6
    assert guard._watch is None


@pytest.mark.parametrize("at", ["blind_spots", "fingerprint"])
def test_a_guard_that_fails_in_the_report(at: str) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, guards=[Failing(at)], sinks=[]) as guardian:
        train(model, optimizer)
    assert not model._forward_hooks
    named = [*(each.seen for each in guardian.findings), *guardian.report().not_watched]
    assert any(f"a bug in {at}" in text for text in named)


def test_a_failing_finite_guard_does_not_take_the_forward_down() -> None:
    class Broken(FiniteGuard):
        def judge(self, seen: Observation) -> Iterable[Finding]:
            raise ZeroDivisionError("a bug")

    model, optimizer = setup()
    with Guardian(model, optimizer, guards=[Broken()], sinks=[]) as guardian:
        train(model, optimizer)
        model(torch.full((1, 2), float("nan")))
    assert [each.code for each in guardian.findings] == ["GG906"]


def test_an_interrupt_in_a_guard_is_an_interrupt() -> None:
    class Interrupted(Guard):
        def judge(self, seen: Observation) -> Iterable[Finding]:
            raise KeyboardInterrupt

    model, optimizer = setup()
    with pytest.raises(KeyboardInterrupt), Guardian(model, optimizer, guards=[Interrupted()], sinks=[]):
        train(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_the_first_guard_that_halts_is_heard() -> None:
    model, optimizer = setup()
    second = Failing("never")
    guardian = Guardian(model, optimizer, guards=[FiniteGuard(), second], sinks=[])
    with pytest.raises(NonFiniteError), guardian:
        train(model, optimizer, 1, scale=float("inf"))
    assert guardian.step == 0
    assert "after_backward" not in second.calls
