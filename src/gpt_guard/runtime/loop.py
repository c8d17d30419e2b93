"""The loop as gpt_guard sees it: tells forward, backward and step apart, and has each measured at its moment.

Every step is the same step: its gradients are measured when its backward ends, read and judged before the optimizer
changes anything, and measured again when it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from gpt_guard.hooks.clearing import Clearings
from gpt_guard.hooks.gradients import Gradients
from gpt_guard.hooks.optimizer import innermost, is_part_of_another
from gpt_guard.hooks.scaler import GradScaler, LossScale, ScalerUse
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation
from gpt_guard.runtime.blind_spots import BlindSpots
from gpt_guard.runtime.dispatch import Dispatch
from gpt_guard.runtime.guard_runner import GuardRunner
from gpt_guard.runtime.progress import Progress
from gpt_guard.runtime.step_record import StepRecords, batch_size

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(act: Callable[Concatenate[Loop, _P], _R]) -> Callable[Concatenate[Loop, _P], _R]:
    """Count what it takes into `spent`."""

    @wraps(act)
    def timed(loop: Loop, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        began = time.perf_counter()
        try:
            return act(loop, *args, **kwargs)
        finally:
            loop.spent += time.perf_counter() - began

    return timed


class Loop:
    """Listens to the model's forwards, to backward, to the optimizers and to GradScalers.

    `blind_spots` counts what passes by, and says what it missed; `spent` are the seconds that went into all of this.
    """

    def __init__(self, watch: Watch, guards: GuardRunner, dispatch: Dispatch, progress: Progress) -> None:
        self.spent = 0.0
        self.blind_spots = BlindSpots(watch, progress)
        self.step_compiled = self.blind_spots.step_compiled
        self._watch, self._guards, self._progress = watch, guards, progress
        self._gradients = Gradients(watch.tracked)
        self._clearings = Clearings(watch, self._gradients)
        self._records = StepRecords(watch, self._gradients, guards, dispatch, progress)
        # The threads in which the model was called.
        self._threads: set[int] = set()
        self._scale, self._scaler_use = LossScale(), ScalerUse()
        # Whether one of our steps has begun since a scaler was asked to step.
        self._stepped_by_scaler = False
        self._loss: Tensor | None = None
        self._forwards = 0
        self._stepped, self._open = False, [0] * len(watch.optimizers)
        self._observed: Observation | None = None

    # Forwards of the model itself.

    @_timed
    def forward_begins(self) -> None:
        """Note whether this is training or evaluation, and how much data it takes."""
        watch = self._watch
        self._threads.add(get_ident())
        watch.evaluation = watch.evaluating or not torch.is_grad_enabled()
        if not watch.evaluation:
            watch.forwards += 1
            samples, tokens = batch_size(watch.tap.inputs)
            self._progress.samples += samples
            self._progress.tokens += tokens
        self.blind_spots.look_inside()
        if watch.inspection.looking or watch.evaluation:
            watch.inspection.forward_begins(evaluation=watch.evaluation)
        self._guards.listen_all(watch.forward_begins)

    @_timed
    def forward_ended(self, output: Any) -> None:
        """An evaluation forward is read when it ends, since no step will come to read it."""
        watch = self._watch
        self._guards.listen_all(watch.forward_ended, output)
        if watch.evaluation:
            watch.tap.inputs = None
            watch.inspection.evaluation_ended()
            if not watch.immediate:
                self._records.judge_early(self._records.early(), evaluation=True)

    # Backward: every one in the process; ours is one that changes gradients of ours.

    @_timed
    def backward_begins(self, losses: tuple[Tensor, ...]) -> bool:
        """False for a backward in a thread that has not called this model, while another has: it is not ours."""
        if self._threads and get_ident() not in self._threads:
            return False
        watch = self._watch
        if not watch.forwards:
            # Modes count also where only parts of the model are called.
            self.blind_spots.look_inside()
        watch.tap.paused = True
        if not watch.closure:
            if watch.regrouped():
                self._renew()
            # An open step is one that has raised.
            self._open = [0] * len(self._open)
        cleared = self._gradients.mark()
        self._clearings.backward_begins()
        if self._stepped or (cleared and watch.micro_batch):
            self._begin_step()
        self._scale.backward_begins(losses)
        watch.scaling = self._scale.unit is not None
        self._loss = self._scale.loss(losses)
        watch.capture.backward_begins(losses)
        if self._loss is not None:
            self._guards.call("before_backward", self._loss)
        self._forwards, watch.forwards = watch.forwards, 0
        return True

    def _renew(self) -> None:
        """The optimizers hold other tensors, in other places perhaps: watch those from here on."""
        watch = self._watch
        if not watch.immediate:
            # What waits is read while its names still stand for the same tensors.
            self._records.judge_early(self._records.early())
        if watch.renew():
            self._clearings.renew(self._gradients.renew(watch.tracked))
            watch.grad_norms = None
            watch.capture.renew(watch.model)
            self.blind_spots.groups_changed()
            self._guards.listen_all(watch.groups_changed)

    def _begin_step(self) -> None:
        self._stepped = False
        self._records.begin()
        self._watch.micro_batch = 0
        self._watch.grad_norms = None

    @_timed
    def backward_ended(self) -> None:
        """Measure the gradients, if this backward was ours."""
        watch, loss = self._watch, self._loss
        watch.tap.paused, self._loss = False, None
        grads = self._gradients.current()
        ours = self._gradients.touched(grads)
        self._scale.backward_ended(ours=ours)
        watch.scaling = self._scale.unit is not None
        if not ours:
            return
        self._scaler_use.backward_ended(self._scale.unit, fresh=self._scale.fresh, state=self._gradients.state)
        if loss is not None and loss.numel() == 1:
            watch.ledger.put(f"loss.{watch.micro_batch}", loss.item() if watch.immediate else loss.reshape(()))
        watch.micro_batch += 1
        watch.grad_norms = self._gradients.measure(self._scale.unit, immediate=watch.immediate, current=grads)
        self._clearings.backward_ended()
        watch.loss = loss
        try:
            self._guards.call("after_backward")
        finally:
            watch.loss = None
        if self.blind_spots.backward(forwards=self._forwards) and not watch.immediate:
            self._records.judge_early(self._records.unstepped())
        watch.capture.backward_ended(watch.micro_batch)

    def backward_failed(self) -> None:
        """The backward raised, or a guard halted: be ready for the next one."""
        self._watch.tap.paused = False
        self._loss = None

    # Optimizers.

    @_timed
    def step_begins(self, index: int, *, closure: bool) -> None:
        """Read and judge before anything changes; with a closure the gradients come later, from inside the step."""
        self._open[index] += 1
        watch = self._watch
        if self._open[index] > 1:
            if is_part_of_another(watch.optimizers[index]):
                return
            # The one that was open has raised, and this one is made in its place.
            self._open[index] = 1
        self._stepped_by_scaler, self._observed = True, None
        self.blind_spots.step()
        if watch.regrouped():
            self._or_no_step(index, self._renew)
        watch.step, watch.closure = self._progress.steps[index], closure
        watch.versions.step_begins((index, watch.step))
        if not closure:
            self._gradients_stand(index)

    def _gradients_stand(self, index: int) -> None:
        """All that was to come before this step has come."""
        self._clearings.step_begins(index)
        if self._scaler_use.seen:
            self._scaler_use.put(self._watch.ledger, index, self._gradients.now())
        self._judge_before(index)

    @_timed
    def closure_ended(self, index: int) -> None:
        """The first evaluation of a closure is where the step starts from."""
        if self._observed is not None:
            return
        if self._watch.since_step:
            self._judge_before(index)
        else:
            # No backward ran in it, as in the one that Lightning gives in manual optimisation: a step like any other.
            self._watch.closure = False
            self._gradients_stand(index)

    def _judge_before(self, index: int) -> None:
        self._observed = self._or_no_step(index, partial(self._records.before, index))

    def _or_no_step(self, index: int, act: Callable[[], _R]) -> _R:
        try:
            return act()
        except BaseException:
            self.closure_failed(index)
            raise

    def closure_failed(self, index: int) -> None:
        """No step after all: whoever goes on begins a new one with the next backward."""
        self._open[index], self._observed = 0, None
        self._end_step()

    @_timed
    def step_ended(self, index: int) -> None:
        """Measure what the step has done."""
        if self._open[index] > 1 and is_part_of_another(self._watch.optimizers[index]):
            self._open[index] -= 1
            return
        self._open[index] = 0
        self._watch.versions.step_ended()
        seen, self._observed = self._observed, None
        self._gradients.remember()
        self._clearings.step_ended(index)
        self._scaler_use.step_ended(index, self._gradients.state)
        try:
            if seen is None:
                # A closure that was never called: there is nothing to compare with.
                self._records.count(index, self._records.measure(index))
            elif seen.skipped:
                self._records.skip(index, seen)
            else:
                self._records.after(index, seen)
        finally:
            self._end_step()
        self.blind_spots.step_ended()
        self._watch.inspection.step_ended(self._progress.step)

    def _end_step(self) -> None:
        watch = self._watch
        self._stepped = True
        self._scale.step_ended()
        watch.scaling = watch.closure = False
        # The batch may be the output of another model, with all of its graph.
        watch.tap.inputs = None
        if watch.tap.order and not watch.tap.calls:
            # Where only methods of the model are called, no call of the model itself ever starts the order anew.
            self.blind_spots.saw_modules = True
            watch.tap.forget()

    # GradScalers: their scale is taken out of every figure, and a step that one leaves out is not a step.

    def loss_scaled(self, scaler: GradScaler, outputs: Any, scaled: Any) -> None:
        """Keep the scale for the backward that follows."""
        self._scale.offer(scaler, outputs, scaled)
        self._scaler_use.scaled(self._scale.offered)

    def scaler_unscales(self, optimizer: Any) -> None:
        """From here on the gradients of this optimizer are the true ones."""
        if (index := self._own(optimizer)) is not None:
            self._scaler_use.unscales(index)

    def scaler_steps(self, optimizer: Any) -> None:
        """A step may follow, or be skipped."""
        self._stepped_by_scaler = False
        if (index := self._own(optimizer)) is not None:
            self.blind_spots.scaler_called()
            self._scaler_use.scaler_steps(index, self._gradients.now())

    @_timed
    def scaler_stepped(self, optimizer: Any) -> None:
        """If none of our steps began in between, the scaler has skipped it."""
        index = self._own(optimizer)
        if index is not None and not self._stepped_by_scaler:
            self.blind_spots.step()
            self._end_step()
            self._scaler_use.step_ended(index, [])
            self._records.skipped_outside(index)
        self._scaler_use.scaler_stepped()

    def _own(self, optimizer: Any) -> int | None:
        inner = innermost(optimizer)
        return next((index for index, own in enumerate(self._watch.optimizers) if own is inner), None)

    def finish(self) -> None:
        """Complete what still waits, and let the guards say what is left to say."""
        if (readings := self._records.read()) and not self._watch.immediate:
            # A forward, or a backward, that no step has followed.
            self._records.judge_early(readings)
        self._guards.finish()
