"""Light steps: seen, judged and told as full ones are, only later where nobody is waiting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, FiniteGuard, Guardian, LRTracker, NonFiniteError, ParamDeltaProbe
from gpt_guard.callbacks.base import Guard
from gpt_guard.records import Moment, Observation, Severity

from .lane_kit import STEPS, Act, Kept, KeptLate, accumulating, batch, light_steps, net, pace, told, train, watched


def test_nearly_all_steps_of_a_plain_loop_are_light_and_tell_the_same() -> None:
    late, full = KeptLate(), KeptLate()
    model = net()
    guardian, optimizer = watched(model, sink=late)
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(STEPS)))
    # A policy of one's own may halt on anything, before the step: so nothing is judged late.
    model = net()
    guardian, optimizer = watched(model, sink=full, policy={"GG906": "record"})
    with guardian:
        for _ in train(model, optimizer, range(STEPS)):
            pass
    assert min(light) > 19
    # One in sixteen is full.
    assert len(light & set(range(24, 56))) >= 28
    assert [seen.step for seen in late.seen] == [seen.step for seen in full.seen] == list(range(STEPS))
    assert told(late) == told(full)
    for one, other in zip(late.seen, full.seen, strict=True):
        assert (one.loss, one.lr, one.micro_batches, one.samples) == (
            other.loss,
            other.lr,
            other.micro_batches,
            other.samples,
        )
        assert one.moment is other.moment is Moment.AFTER_STEP
        assert one.clipped is other.clipped is True
        assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert one.grad_norm_clipped == pytest.approx(other.grad_norm_clipped, rel=1e-5)
        assert one.update_ratio == pytest.approx(other.update_ratio, rel=1e-5)
        assert one.max_update == pytest.approx(other.max_update, rel=1e-5)
        assert one.step_time is not None
        assert one.step_time > 0.0


def waiting_after_each(sink: Kept, policy: Any = None) -> list[int]:
    """How many steps of a plain loop had not been told of, after each of them."""
    model = net()
    guardian, optimizer = watched(model, sink=sink, policy=policy)
    with guardian:
        return [step + 1 - len(sink.seen) for step in train(model, optimizer, range(STEPS))]


def test_light_steps_are_judged_before_the_next_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_guard.runtime.lane._SLOW", math.inf)
    waiting = waiting_after_each(KeptLate())
    first = waiting.index(1)
    assert first > 19
    # None is left when a full step begins; that one is told of at once.
    assert waiting[first : first + 16] == [*range(1, 15), 0, 0]


def test_where_a_step_takes_long_each_is_judged_as_soon_as_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_guard.runtime.lane._SLOW", 0.0)
    assert set(waiting_after_each(KeptLate())) == {0}


def test_what_is_asked_for_is_there_at_once() -> None:
    model = net()
    guardian, optimizer = watched(model, summary=False)
    with guardian:
        for step in train(model, optimizer, range(STEPS)):
            if step >= 40:
                assert guardian.latest is not None
                assert guardian.latest.step == step
                assert guardian.latest.update_ratio is not None
            if step == 30:
                assert guardian.report().last_loss is not None
        assert guardian.step == STEPS
    report = guardian.report()
    assert report.steps == STEPS
    assert report.clipped_share == 1.0


def test_what_waits_is_judged_before_a_state_is_loaded() -> None:
    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    with guardian:
        state = guardian.state_dict()
        for _ in train(model, optimizer, range(29)):
            pass
        assert len(sink.seen) < 29
        guardian.load_state_dict(state)
        assert [seen.step for seen in sink.seen] == list(range(29))
        assert guardian.step == 0


class Named(nn.Module):
    """Is called with its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, *, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits


def test_a_model_that_is_called_by_keyword_has_light_steps_too() -> None:
    sink, model = KeptLate(), Named()
    guardian, optimizer = watched(model, sink=sink)
    light = 0
    with guardian:
        for step in range(40):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x=x), y).backward()
            light += not pace(guardian).full
            optimizer.step()
    assert light >= 15
    assert [seen.samples for seen in sink.seen] == [16 * (step + 1) for step in range(40)]


def test_an_inspected_step_is_a_full_one() -> None:
    model = net()
    guardian, optimizer = watched(model, inspect_every=30)
    inspected: list[bool] = []

    def note(_step: int, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        assert guardian._session is not None
        watch = guardian._session.watch
        if watch.inspection.active:
            inspected.append(watch.pace.full)

    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(STEPS), note))
    assert light
    assert len(inspected) == 4
    assert all(inspected)


def test_an_output_that_waits_for_each_step_gets_it() -> None:
    sink, model = Kept(), net()
    guardian, optimizer = watched(model, sink=sink)
    with guardian:
        for step in train(model, optimizer, range(STEPS)):
            assert sink.seen[-1].step == step


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("mine")], ids=repr)
def test_a_run_that_ends_in_between_has_all_its_steps(stop: BaseException) -> None:
    def stops(step: int, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        if step == 33:
            raise stop

    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    with pytest.raises(type(stop)), guardian:
        list(train(model, optimizer, range(STEPS), stops))
    assert [seen.step for seen in sink.seen] == list(range(33))


class Spikes(Guard):
    """Speaks of one step; may be told of it late."""

    late = True
    light = frozenset()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        if seen.step == 30:
            yield Finding(code="MY101", title="thirty", severity=Severity.WARNING, seen="this", step=seen.step)


class Prompt(Spikes):
    """The same, and wants to be asked at its step."""

    late = False


def test_a_finding_of_a_light_step_is_told_within_eight_and_under_its_own_step() -> None:
    for guard, most in ((Spikes(), 8), (Prompt(), 1)):
        sink, model = KeptLate(), net()
        guardian, optimizer = watched(model, sink=sink, guards=[guard])
        with guardian:
            told = next(step for step in train(model, optimizer, range(STEPS)) if sink.found)
            assert 30 <= told < 30 + most
            assert pace(guardian).full
        ((_, found), *_) = sink.found
        assert (found.code, found.step) == ("MY101", 30)
        assert found.history[-1].step == 29


class NowAndThen(Guard):
    """Wants to be asked at its step, in one of five."""

    light = frozenset()

    def __init__(self) -> None:
        self.judged: list[int] = []

    def due(self) -> bool:
        return self.watch.step % 5 == 0

    def judge(self, seen: Observation) -> Iterable[Finding]:
        self.judged.append(seen.step)
        return ()


def test_a_guard_that_is_not_due_is_not_called_in_a_light_step() -> None:
    model, guard = net(), NowAndThen()
    guardian, optimizer = watched(model, guards=[guard])
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(STEPS)))
    # The first that might be light is full once more: no learning rate is known to compare with.
    left_out = {step for step in light if step % 5 and min(light) < step < STEPS}
    assert left_out
    assert guard.judged == [step for step in range(STEPS) if step not in left_out]


def test_who_looks_at_the_findings_hears_of_it_at_once() -> None:
    model = net()
    guardian, optimizer = watched(model, guards=[Spikes()])
    with guardian:
        told = next(step for step in train(model, optimizer, range(STEPS)) if guardian.findings)
    assert told == 30


def test_strict_and_policies_halt_before_the_step() -> None:
    model = net()
    before: list[Tensor] = []

    def remember(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        before[:] = [parameter.detach().clone() for parameter in model.parameters()]

    guardian, optimizer = watched(model, guards=[Spikes()], policy={"MY101": "halt"})
    with pytest.raises(Exception, match="MY101"), guardian:
        list(train(model, optimizer, range(STEPS), remember))
    assert guardian.step == 30
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def poison_gradient(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    if step == 30:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad[0, 0] = math.nan


def poison_weight(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    if step == 29:
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.nan


@pytest.mark.parametrize(("act", "code", "step"), [(poison_gradient, "GG104", 30), (poison_weight, "GG105", 29)])
def test_what_is_not_finite_halts_in_a_light_step(act: Act, code: str, step: int) -> None:
    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    with pytest.raises(NonFiniteError) as halt, guardian:
        list(train(model, optimizer, range(STEPS), act, clip=0.0))
    assert (halt.value.finding.code, halt.value.finding.step, guardian.step) == (code, step, 30)
    assert halt.value.finding.parameter == "0.weight"
    # The steps before it were judged first, and are its history.
    assert [seen.step for seen in halt.value.finding.history][-4:] == [step - 4, step - 3, step - 2, step - 1]
    assert halt.value.finding.last_healthy is not None
    assert halt.value.finding.last_healthy.step == step - 1


def clamp_past_the_counters(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-4, 1e-4)


def test_a_write_that_no_counter_shows_keeps_every_step_full() -> None:
    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(40), clamp_past_the_counters, clip=0.0))
    assert not light
    assert all((seen.grad_norm_clipped or 0.0) < 0.2 * (seen.grad_norm or 0.0) for seen in sink.seen)


def halve(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 0.5


def clip_in_two(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    weight, *others = model.parameters()
    nn.utils.clip_grad_norm_([weight], 1e-3)
    nn.utils.clip_grad_norm_(others, 1e-3)


@pytest.mark.parametrize("act", [halve, clip_in_two])
def test_a_write_that_counters_show_is_measured(act: Act) -> None:
    sink, model = KeptLate(), net()
    applied: list[float] = []

    def note(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        act(step, model, optimizer)
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        applied.append(float(torch.cat(grads).norm()))

    guardian, optimizer = watched(model, sink=sink)
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(40), note, clip=0.0))
    assert light
    assert [seen.grad_norm_clipped for seen in sink.seen] == pytest.approx(applied, rel=1e-5)


def test_a_scheduler_is_judged_by_where_it_stood_at_its_step() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    sink = KeptLate()
    with Guardian(model, optimizer, guards=[LRTracker()], scheduler=scheduler, sinks=[sink]) as guardian:
        light = set()
        for step in train(model, optimizer, range(STEPS)):
            scheduler.step()
            if step >= 30:
                # From here on twice too often.
                scheduler.step()
            light |= set() if pace(guardian).full else {step + 1}
    assert {22, 23, 31} <= light
    ((_, found), *_) = sink.found
    assert (found.code, found.step) == ("GG405", 33)


class Idle(torch.optim.AdamW):
    """Stops to do anything at some step."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own subclasses do
        self.steps += 1
        if self.steps <= 32:
            super().step(closure)


def test_a_step_that_changes_nothing_is_told_little_later_than_in_full_steps() -> None:
    found: list[Finding] = []
    for policy in ({"GG906": "record"}, None):
        model = net()
        optimizer = Idle(model.parameters(), lr=1e-3)
        guards: list[Guard] = [ParamDeltaProbe(), FiniteGuard()]
        with Guardian(model, optimizer, guards=guards, policy=policy, sinks=[]) as guardian:
            for _ in train(model, optimizer, range(STEPS)):
                pass
        found += guardian.findings
    assert [each.code for each in found] == ["GG301", "GG301"]
    first, later = (each.step or 0 for each in found)
    assert 34 <= first <= later <= first + 8


class Order(Guard):
    """Notes what it is told of, and when."""

    late = True
    light = frozenset()

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def after_backward(self) -> None:
        self.told.append(("backward", self.watch.step))

    def judge(self, seen: Observation) -> Iterable[Finding]:
        self.told.append(("judged", seen.step))
        return ()


def test_what_waits_is_judged_before_a_guard_is_told_of_the_next_backward() -> None:
    model, guard = net(), Order()
    guardian, optimizer = watched(model, guards=[guard])
    with guardian:
        for _ in accumulating(lambda step: 2 if step >= 27 else 1)(model, optimizer):
            pass
    assert ("backward", 26) not in guard.told
    first = guard.told.index(("backward", 27))
    assert [step for what, step in guard.told[:first] if what == "judged"] == list(range(27))


def test_a_mode_set_by_a_call_is_seen_where_only_parts_of_the_model_are_called() -> None:
    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    light = set()
    with guardian:
        for step in range(40):
            x, y = batch(step)
            optimizer.zero_grad()
            if step == 25:
                model.eval()
            for part in model.children():
                x = part(x)
            F.cross_entropy(x, y).backward()
            light |= set() if pace(guardian).full else {step}
            optimizer.step()
    assert 24 in light
    assert told(sink) == [("GG503", 25)]


class FailsOnce(torch.optim.AdamW):
    """Raises instead of a step, once."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own subclasses do
        self.steps += 1
        if self.steps == 28:
            raise RuntimeError("no memory")
        super().step(closure)


def test_the_steps_after_one_that_raised_are_all_seen() -> None:
    sink, model = KeptLate(), net()
    optimizer = FailsOnce(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[sink]):
        for step in range(40):
            try:
                next(train(model, optimizer, [step]))
            except RuntimeError:
                continue
    assert [seen.step for seen in sink.seen] == list(range(39))
    assert not sink.found


class Broken(FiniteGuard):
    """Fails itself at some step."""

    def judge(self, seen: Observation) -> Iterable[Finding]:
        if seen.step == 5:
            raise ValueError("mine")
        return super().judge(seen)


def test_a_guard_that_is_switched_off_is_not_called_in_full_steps_any_more() -> None:
    model = net()
    guardian, optimizer = watched(model, guards=[Broken()])
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(40)))
    assert guardian._desk.counts == {"GG906": 1}
    assert light


def test_guarded_is_bit_identical_through_light_steps() -> None:
    states: list[Sequence[Tensor]] = []
    for guarded in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        guardian = Guardian(model, optimizer, sinks=[]) if guarded else None
        if guardian is not None:
            guardian.start()
        for _ in train(model, optimizer, range(STEPS)):
            pass
        if guardian is not None:
            guardian.stop()
        states.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
