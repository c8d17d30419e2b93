"""Replayer: what Guardian asks when something has gone non-finite, and what a person can ask at any time."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.capture.capture import Capture, ForwardCall, LossCall, NoCapture, versions_of
from gpt_guard.hooks.capture.output_gradients import bypassed, gradients_of, reached
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.replaying.in_place import InPlaceWrite, in_place_writes
from gpt_guard.replaying.isolation import with_stubs
from gpt_guard.replaying.recipe import LossRecipe, Recipe, ReplayOutcome, target_of, with_outcome
from gpt_guard.replaying.run import replay_step
from gpt_guard.replaying.step_runner import StepRunner, why_not
from gpt_guard.replaying.trace import make_ready

_P = ParamSpec("_P")
_R = TypeVar("_R")
# A trace takes about as long as two to five plain steps; a machine that is busy with something else takes longer.
_STEPS = 20.0
_LEAST_S = 5.0
# A loop that catches the same halt again and again must not spend its time on replays.
_MOST_PER_CAUSE = 3
_NAMED = 3


class Replayer:
    """Belongs to one Guardian and survives leaving it; `open` and `close` give it a loop to look at.

    `limit` is True for a limit of its own (20 steps, at least 5 s), a number of seconds, or False for no replay.
    """

    def __init__(self, limit: bool | float = True) -> None:
        self._limit = limit
        self._watch: Watch | None = None
        self._latest: Callable[[], Observation | None] = _nothing_yet
        self._asked: Counter[Any] = Counter()
        self._busy = False
        # Which of the calls it was, not what with: a batch must not outlive its step.
        self._tried: tuple[Finding, int] | None = None
        self.capture: Capture | None = None
        self.last: ReplayOutcome | None = None
        self.failed: str | None = None

    def open(self, watch: Watch, latest: Callable[[], Observation | None]) -> None:
        """Begin to capture, unless nothing is to be replayed."""
        if self._limit is not False:
            self._watch, self._latest = watch, latest
            watch.capture = self.capture = Capture(watch.model, immediate=watch.immediate)
            # First of all listeners: one of the guards may halt.
            watch.forward_begins.insert(0, self._forward_begins)
            watch.forward_ended.insert(0, self._forward_ended)

    def _forward_begins(self) -> None:
        watch, capture = self._watch, self.capture
        if watch is not None and capture is not None and watch.tap.inputs is not None:
            try:
                capture.forward_begins(watch.tap.inputs, watch.step, evaluation=watch.evaluation)
            except Exception as error:
                self._give_up(error)

    def _forward_ended(self, output: Any) -> None:
        if self.capture is not None:
            try:
                self.capture.forward_ended(output)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Something in a batch or an output is of a kind that cannot be kept: the loop must not notice."""
        self.failed = f"Not replayed: the step could not be captured ({type(error).__name__}: {error})."
        if self._watch is not None:
            self._watch.capture = NoCapture()
        self.capture = None

    def close(self) -> None:
        """Let go of everything but the last outcome; may run twice."""
        if self.capture is not None:
            self.capture.close()
        if self._watch is not None:
            self._watch.capture = NoCapture()
        self._watch = self.capture = None
        self._latest = _nothing_yet

    def enrich(self, finding: Finding) -> Finding:
        """The finding with what its replay has shown, or as it was if there is nothing to be run. Never raises."""
        if self._busy or self._watch is None or target_of(finding) is None:
            return finding
        self._asked[finding.cause] += 1
        if self._asked[finding.cause] > _MOST_PER_CAUSE:
            return finding
        try:
            outcome = self._run(finding)
        except Exception as error:  # whatever it is, the finding is what must be heard
            outcome = ReplayOutcome(False, f"Not replayed: {type(error).__name__}: {error}.", decided=False)
        enriched = with_outcome(finding, outcome)
        self.last = replace(outcome, finding=enriched)
        return enriched

    def recipe_for(self, finding: Finding) -> Recipe | None:
        """What the step of a finding was made of: of several calls the one that has failed again, else the likeliest.

        To be asked while the step is still held: directly after `enrich`. None where nothing was captured.
        """
        if self._watch is None or self.capture is None:
            return None
        asked, place = self._tried if finding.replay is not None and self._tried is not None else (finding, 0)
        recipes = [recipe for recipe, _ in _recipes(self._watch, self.capture, asked)]
        return recipes[min(place, len(recipes) - 1)] if recipes else None

    def now(self) -> ReplayOutcome:
        """Run the newest step again, on demand; where nothing is held any more, the last outcome.

        If something was found in it, until that goes bad again. Raises GuardUsageError where there is neither.
        """
        newest = None if self.capture is None else self.capture.now
        if newest is not None and not self._busy:
            asked = None if self._tried is None else self._tried[0]
            return self._run(asked if asked is not None and asked.step == newest.step else None)
        if self.last is None:
            raise GuardUsageError(
                "there is no step to run again: call guardian.replay() between a forward of the model and the end of "
                "its step, or after a finding, with replay=True"
            )
        return self.last

    def _run(self, finding: Finding | None) -> ReplayOutcome:
        watch, capture = self._watch, self.capture
        assert watch is not None
        if capture is None:
            return ReplayOutcome(False, self.failed or _nothing_kept(finding, capture), finding=finding, decided=False)
        make_ready()
        ends = time.monotonic() + self._limit_s()
        functions = watch.inspection.functions
        before = watch.tap.paused, functions.muted
        watch.tap.paused = functions.muted = self._busy = True
        self._tried = None if finding is None else (finding, 0)
        missed: list[ReplayOutcome] = []
        try:
            for place, (recipe, changing) in enumerate(_recipes(watch, capture, finding)):
                left = max(ends - time.monotonic(), 0.0)
                outcome = replay_step(watch.model, recipe, limit_s=left, changing=changing, live=True)
                if outcome.reproduced:
                    self._tried = None if finding is None else (finding, place)
                    return outcome
                missed.append(outcome)
        finally:
            watch.tap.paused, functions.muted = before
            self._busy = False
        if not missed:
            return ReplayOutcome(False, _nothing_kept(finding, capture), finding=finding, decided=False)
        # One that says where the fault lies, or why it could not be run, says more than one that went well.
        return next((each for each in missed if not each.decided), missed[-1])

    def in_place_writes(self) -> list[InPlaceWrite] | None:
        """What the newest forward writes in place, from running it again; None where it cannot be run alone."""
        watch, capture = self._watch, self.capture
        if watch is None or capture is None or self._busy or why_not(watch.model) is not None:
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None
        recipes = [recipe for recipe, _ in _recipes(watch, capture, None)]
        if not recipes:
            return None
        make_ready()
        functions = watch.inspection.functions
        before = watch.tap.paused, functions.muted
        watch.tap.paused = functions.muted = self._busy = True
        try:
            return in_place_writes(StepRunner(watch.model, recipes[0], limit_s=self._limit_s(), live=True))
        finally:
            watch.tap.paused, functions.muted = before
            self._busy = False

    def _limit_s(self) -> float:
        if self._limit is not True:
            return float(self._limit)
        latest = self._latest()
        step_time = None if latest is None else latest.step_time
        return max(_LEAST_S, _STEPS * (step_time or 0.0))

    def watch_loss(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """The function, which tells the capture what it is called with while a loop is watched."""

        @functools.wraps(function)
        def watched(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            capture = self.capture
            if capture is None or self._busy or not torch.is_grad_enabled():
                return function(*args, **kwargs)
            call = capture.loss_begins(function, args, kwargs, 0 if self._watch is None else self._watch.step)
            try:
                result = function(*args, **kwargs)
            except BaseException:
                capture.loss_failed()
                raise
            capture.loss_ended(call, result)
            return result

        return watched


def _nothing_kept(finding: Finding | None, capture: Capture | None) -> str:
    if capture is None or (capture.count == 0 and not capture.calls):
        return (
            "Not replayed: the loop calls parts or methods of the model, not the model itself, so its inputs are not "
            "known. (`model.compile()` hides its calls, `torch.compile(model)` does not.) Put what makes the loss into "
            "one function and wrap it as guardian.watch_loss(function): it is then run again as a whole."
        )
    if finding is None or finding.moment is Moment.FORWARD:
        return "Not replayed: no call of the model itself was running, so its inputs are not known."
    return (
        f"Not replayed: what micro-batch {finding.micro_batch} was made of is no longer held. After an optimizer's "
        f"step the weights of the forward are gone; of several large batches in a step only the last is held."
    )


def _nothing_yet() -> None:
    return None


def _recipes(watch: Watch, capture: Capture, finding: Finding | None) -> Iterator[tuple[Recipe, list[Tensor]]]:
    """The recipes that may have failed, in the order in which they are to be tried; without a finding, the newest.

    Each comes with the parameters that have been written to since its forward began.
    """
    for call in _calls(watch, capture, finding):
        # A call that only stands for a loss function is nothing without it.
        losses: Sequence[LossCall | None] = call.loss_calls or (() if call.alone else (None,))
        for loss in losses:
            changed = _changed(watch, capture, call)
            yield _recipe(watch, capture, call, loss, finding, list(changed)), list(changed.values())


def _calls(watch: Watch, capture: Capture, finding: Finding | None) -> Sequence[ForwardCall]:
    now = [] if capture.now is None else [capture.now]
    if finding is None:
        return now
    if watch.immediate and finding.moment is Moment.FORWARD:
        # What goes bad while no call of the model runs comes from modules that the loop calls one by one.
        return [call for call in now if call.running]
    if finding.evaluation:
        return [] if capture.evaluation is None else [capture.evaluation]
    wanted = finding.micro_batch
    calls = [call for call in capture.calls if wanted is None or call.micro_batch == wanted]
    # A second backward through a graph that was retained has no forward of its own.
    calls = calls or [call for call in capture.newest() if wanted is not None and call.micro_batch < wanted]
    versions = capture.parameter_versions()
    # A closure runs several forwards in one step, each with other parameters: those that are gone cannot be run.
    return [call for call in calls if call.parameters == versions] or calls


def _changed(watch: Watch, capture: Capture, call: ForwardCall) -> dict[str, Tensor]:
    versions = zip(watch.model.named_parameters(), call.parameters, capture.parameter_versions(), strict=False)
    return {name: parameter for (name, parameter), before, now in versions if before != now}


def _recipe(
    watch: Watch,
    capture: Capture,
    call: ForwardCall,
    loss: LossCall | None,
    finding: Finding | None,
    changed: Sequence[str],
) -> Recipe:
    first, again = reached(call.losses, {output.number for output in call.outputs})
    direct = [output for output in call.outputs if output.number in first]
    behind = [output for output in call.outputs if output.number in again]
    others = () if call.running or call.alone else _other_ways(watch, capture, call, finding)
    return Recipe(
        args=with_stubs(call.args, "args"),
        kwargs=with_stubs(call.kwargs, "kwargs"),
        context=call.context,
        reached=tuple(output.position for output in direct),
        gradients=gradients_of(direct, call.losses),
        also=gradients_of(behind, ()),
        finding=finding,
        loss=None if loss is None else _loss(loss, call.losses),
        notes=(*_notes(call, loss, changed), *others),
        step=call.step,
        micro_batch=call.micro_batch,
        evaluation=call.evaluation,
        inside=call.running and not call.alone,
        alone=call.alone,
    )


def _loss(call: LossCall, losses: Sequence[Tensor]) -> LossRecipe:
    args, kwargs = with_stubs(call.args, "args"), with_stubs(call.kwargs, "kwargs")
    return LossRecipe(call.function, args, kwargs, call.context, gradients_of(call.outputs, losses), call.calls_model)


def _other_ways(watch: Watch, capture: Capture, call: ForwardCall, finding: Finding | None) -> Iterator[str]:
    """A penalty on weights gives a parameter a gradient that no output of the model has seen."""
    parameter = watch.parameters.get(finding.parameter or "") if finding is not None else None
    # A backward through several calls of the model comes to the parameter through each of them.
    numbers = {output.number for other in capture.calls for output in other.outputs}
    if parameter is not None and bypassed(call.losses, numbers, parameter):
        yield (
            f"The loss also depends on `{watch.name_of(parameter)}` directly, as a penalty on weights does, and not "
            f"only through what the model returned: that part was not run again."
        )


def _notes(call: ForwardCall, loss: LossCall | None, changed: Sequence[str]) -> Iterator[str]:
    if versions_of(call.args, call.kwargs) != call.versions:
        yield "The batch has been written to in place since the forward began: the replay used what it holds now."
    if loss is not None and versions_of(loss.args, loss.kwargs) != loss.versions:
        yield "What the loss function was given has been written to in place since: the replay used what it holds now."
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        listed = ", ".join(f"`{name}`" for name in changed[:_NAMED]) + more
        yield f"Parameters have been written to since the forward began ({listed}): they were used as they are now."
    if not call.context.random:
        yield "The state of the random generators could not be read while a CUDA graph was being recorded."
