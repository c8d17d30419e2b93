"""Inspection: which steps are looked at, and that everything is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpt_guard import Guardian, GuardUsageError, ParamDeltaProbe
from gpt_guard.callbacks.base import Guard
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Report


class Looker(Guard):
    """Notes the steps in which it saw calls of dropout, and the stretches of inspected steps."""

    def __init__(self, *, fails: bool = False) -> None:
        self.steps: list[tuple[int, bool]] = []
        self.stretches: list[str] = []
        self.fails = fails

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        watch.inspection.functions.listen(["dropout"], self._called)
        watch.inspection.on_begin(self._begins)
        watch.inspection.on_end(self._ends)

    def _begins(self) -> None:
        self.stretches.append("begin")

    def _ends(self) -> None:
        self.stretches.append("end")

    def _called(self, call: FunctionCall) -> None:
        if self.fails:
            raise ValueError("a mistake in a guard")
        self.steps.append((self.watch.step, self.watch.evaluation))

    def judge(self, seen: Any) -> Iterable[Any]:
        return ()


class Loop:
    """A loop of one layer and dropout."""

    def __init__(self, guard: Guard, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.guardian = Guardian(self.model, self.optimizer, guards=[guard], sinks=[], **settings)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.mse_loss(self.model(torch.ones(2, 4)), torch.ones(2, 4)).backward()
            self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 4))


def stack() -> int:
    return torch._C._len_torch_function_stack()


def test_the_first_steps_are_inspected_and_then_the_mode_is_gone() -> None:
    looker = Looker()
    loop = Loop(looker)
    with loop.guardian:
        assert stack() == 1
        loop.train(5)
        assert stack() == 0
    assert looker.steps == [(0, False), (1, False), (2, False)]
    assert looker.stretches == ["begin", "end"]


def test_inspect_steps_and_inspect_every_say_which_steps_are_inspected() -> None:
    looker = Looker()
    loop = Loop(looker, inspect_steps=1, inspect_every=3)
    with loop.guardian:
        loop.train(8)
    assert [step for step, _ in looker.steps] == [0, 4]


def test_no_step_is_inspected_where_none_is_asked_for() -> None:
    looker = Looker()
    loop = Loop(looker, inspect_steps=0)
    with loop.guardian:
        assert stack() == 0
        loop.train(2)
        loop.guardian.inspect_now()
        loop.train(2)
    assert looker.steps == [(2, False)]


def test_late_evaluations_are_looked_at_too() -> None:
    looker = Looker()
    loop = Loop(looker, inspect_steps=2)
    with loop.guardian:
        loop.train(3)
        for _ in range(4):
            loop.evaluate()
        assert stack() == 0
    assert looker.steps == [(0, False), (1, False), (3, True), (3, True)]


def test_the_last_of_several_optimizers_has_its_inspected_steps_too() -> None:
    class Steps(Looker):
        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.steps.append((self.watch.index_of(optimizer), self.watch.inspection.active))

    looker = Steps()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, second)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    with Guardian(model, optimizers, guards=[looker], sinks=[], inspect_steps=2):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert looker.steps == [(0, True), (1, True), (0, True), (1, True), (0, False), (1, False)]


def test_parts_of_a_container_with_optimizers_of_their_own_are_not_inspected_for_ever() -> None:
    """The container is never called itself, so no forward of it ends the stretch."""
    looker = Looker()
    parts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in parts]
    with Guardian(parts, optimizers, guards=[looker], sinks=[], inspect_steps=2) as guardian:
        for _ in range(8):
            for part, optimizer in zip(parts, optimizers, strict=True):
                optimizer.zero_grad()
                part(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    assert guardian.report().inspected_steps == 2
    assert {step for step, _ in looker.steps} == {0, 1, 2}
    assert looker.stretches == ["begin", "end"]


def test_a_resumed_run_is_inspected_again() -> None:
    looker = Looker()
    loop = Loop(looker, inspect_steps=1)
    with loop.guardian as guardian:
        loop.train(2)
        guardian.load_state_dict(guardian.state_dict())
        loop.train(2)
    assert [step for step, _ in looker.steps] == [0, 2]


def test_steps_are_inspected_again_once_the_optimizer_holds_other_parameters() -> None:
    looker = Looker()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with Guardian(model, optimizer, guards=[ParamDeltaProbe(), looker], sinks=[], inspect_steps=1):
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": model[2].parameters()})
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    # Noticed in step 3, whose forward is over by then.
    assert [step for step, _ in looker.steps] == [0, 4]
    assert looker.stretches == ["begin", "end", "begin", "end"]


def test_a_loop_that_never_steps_is_not_inspected_for_ever() -> None:
    loop = Loop(Looker(), inspect_steps=1)
    with loop.guardian:
        for _ in range(120):
            loop.model(torch.ones(2, 4)).sum().backward()
        assert stack() == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_mode_is_gone_on_every_way_out(error: type[BaseException]) -> None:
    looker = Looker()
    loop = Loop(looker)

    def fail() -> None:
        with loop.guardian:
            loop.train(1)
            raise error

    with pytest.raises(error):
        fail()
    assert stack() == 0
    assert looker.stretches == ["begin", "end"]


def test_a_guard_that_fails_in_a_listener_is_switched_off_and_training_goes_on() -> None:
    loop = Loop(Looker(fails=True))
    with loop.guardian as guardian:
        loop.train(3)
    assert [found.code for found in guardian.findings] == ["GG906"]
    assert guardian.step == 3


def test_a_probe_runs_the_model_unseen_and_changes_nothing() -> None:
    class Prober(Looker):
        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            if self.watch.inspection.active:
                with self.watch.inspection.probing("noise"):
                    self.watch.model.eval()
                    self.watch.model(torch.randn(2, 4)).sum().backward()

    def weights(guard: Guard) -> tuple[torch.Tensor, int, Report]:
        loop = Loop(guard)
        with loop.guardian as guardian:
            loop.train(5)
        return loop.model.state_dict()["0.weight"], guardian.step, guardian.report()

    prober = Prober()
    probed, steps, report = weights(prober)
    plain, _, _ = weights(Looker())
    assert torch.equal(probed, plain)
    assert steps == 5
    assert report.probes == {"noise": 3}
    assert report.inspected_steps == 3
    assert report.inspection_seconds > 0.0
    assert prober.steps == [(0, False), (1, False), (2, False)]


def test_usage_errors_say_what_to_write() -> None:
    loop = Loop(Looker())
    with pytest.raises(GuardUsageError, match="not watching"):
        loop.guardian.inspect_now()
    with pytest.raises(GuardUsageError, match="inspect_steps"):
        Guardian(loop.model, loop.optimizer, inspect_steps=-1)


def test_a_guard_that_only_inspects_is_left_alone_two_steps_after() -> None:
    class Inspector(Looker):
        inspects = True

        def __init__(self) -> None:
            super().__init__()
            self.called: list[int] = []
            self.judged: list[int] = []

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.called.append(self.watch.step)

        def judge(self, seen: Any) -> Iterable[Any]:
            self.judged.append(seen.step)
            return ()

    inspector = Inspector()
    loop = Loop(inspector, inspect_steps=1)
    with loop.guardian as guardian:
        loop.train(6)
        loop.evaluate()
        loop.train(1)
        guardian.inspect_now()
        loop.train(4)
    assert inspector.called == inspector.judged
    # The late evaluation wakes it for two steps, the second of which is inspected again.
    assert inspector.called == [0, 1, 2, 6, 7, 8, 9]
