"""The loop as gpt_guard sees it: tells forward, backward and step apart, and has each measured at its moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TypeVar

from torch import Tensor

from gpt_guard.hooks.clearings import Clearings
from gpt_guard.hooks.gradients import Gradients
from gpt_guard.hooks.optimizer import is_part_of_another
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation
from gpt_guard.runtime.backlog import Backlog
from gpt_guard.runtime.blind_spots import Unseen
from gpt_guard.runtime.dispatch import Desk
from gpt_guard.runtime.forwards import Forwards
from gpt_guard.runtime.guard_runner import Roster
from gpt_guard.runtime.lane import Lane
from gpt_guard.runtime.progress import Progress
from gpt_guard.runtime.scaled import ScalerEvents
from gpt_guard.runtime.stepping import Steps

_R = TypeVar("_R")


class Loop:
    """Listens to backward and optimizer; `forwards` listens to the model, `scaler` to GradScalers.

    `unseen` counts what passes by, and says what it missed.
    """

    def __init__(self, watch: Watch, roster: Roster, desk: Desk, progress: Progress) -> None:
        self.unseen = Unseen(watch, progress)
        self.step_compiled = self.unseen.step_compiled
        self._watch, self._roster, self._progress = watch, roster, progress
        self._gradients = Gradients(watch.tracked)
        self._clearings = Clearings(watch, self._gradients)
        self._steps = Steps(watch, self._gradients, roster, desk, progress)
        self._pace, self._backlog = watch.pace, Backlog(roster, desk, progress)
        watch.settle = self._backlog.settle
        self.forwards = Forwards(watch, roster, progress, self._steps, self._backlog, self.unseen.look_inside)
        self._threads = self.forwards.threads
        self._lane: Lane | None = None
        if watch.immediate and len(watch.optimizers) == 1 and desk.policy.usual:
            parts = watch, self._gradients, roster, self._steps, progress, self.unseen, self._backlog
            self._lane = Lane(*parts, self._measure, late=desk.late)
        self.scaler = ScalerEvents(watch, self._gradients, self.unseen, self._skipped)
        self._scale, self._use = self.scaler.scale, self.scaler.use
        self._loss: Tensor | None = None
        self._stepped, self._open = False, [0] * len(watch.optimizers)
        self._observed: Observation | None = None

    # Backward: every one in the process; ours is one that changes gradients of ours.

    def backward_begins(self, losses: tuple[Tensor, ...]) -> bool:
        """False for a backward in a thread that has not called this model, while another has: it is not ours."""
        if self._threads and get_ident() not in self._threads:
            return False
        watch, lane = self._watch, self._lane
        if lane is not None:
            if lane.light.waited:
                lane.light.resolve()
            if not watch.forwards:
                self.forwards.passed_by()
            # An open step is one that has raised.
            usual = not (self._pace.full or watch.closure or self._use.seen or self._open[0])
            if usual and lane.backward_begins(losses):
                watch.tap.paused, self._loss, self._stepped, watch.forwards = True, losses[0], False, 0
                return True
            lane.long_way()
            # Guards that are told of each backward have seen the steps before it by then.
            self._backlog.settle()
        watch.tap.paused = True
        if not watch.closure:
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
            self._roster.call("before_backward", self._loss)
        watch.forwards = 0
        return True

    def _begin_step(self) -> None:
        self._stepped = False
        self._steps.begin()
        self._watch.micro_batch = 0
        self._watch.grad_norms = None

    def backward_ended(self) -> None:
        """Measure the gradients, if this backward was ours."""
        watch, loss, lane = self._watch, self._loss, self._lane
        watch.tap.paused, self._loss = False, None
        if lane is not None and lane.began:
            if lane.backward_ended():
                return
            self._backlog.settle()
        self._measure(loss)

    def _measure(self, loss: Tensor | None) -> None:
        """Measure the gradients in full, if a backward has changed ours."""
        watch, lane = self._watch, self._lane
        grads = self._gradients.current()
        ours = self._gradients.touched(grads)
        self._scale.backward_ended(ours=ours)
        watch.scaling = self._scale.unit is not None
        if not ours:
            return
        self._use.backward_ended(self._scale.unit, fresh=self._scale.fresh, state=self._gradients.state)
        if loss is not None and loss.numel() == 1:
            watch.ledger.put(f"loss.{watch.micro_batch}", loss.item() if watch.immediate else loss.reshape(()))
        watch.micro_batch += 1
        watch.grad_norms = self._gradients.measure(self._scale.unit, immediate=watch.immediate, current=grads)
        self._clearings.backward_ended()
        if lane is not None:
            lane.note()
        watch.loss = loss
        try:
            self._roster.call("after_backward")
        finally:
            watch.loss = None
        if self.unseen.backward() and not watch.immediate:
            self._steps.judge_early(self._steps.unstepped())
        watch.capture.backward_ended(watch.micro_batch)

    def backward_failed(self) -> None:
        """The backward raised, or a guard halted: be ready for the next one."""
        if self._lane is not None:
            self._lane.backward_failed()
        self._watch.tap.paused = False
        self._loss = None

    # Optimizer.

    def step_begins(self, index: int, *, closure: bool) -> None:
        """Read and judge before anything changes; with a closure the gradients come later, from inside the step."""
        self._open[index] += 1
        watch, lane = self._watch, self._lane
        if self._open[index] > 1:
            if is_part_of_another(watch.optimizers[index]):
                return
            # The one that was open has raised, and this one is made in its place.
            self._open[index] = 1
            if lane is not None:
                lane.ready, lane.stepping = lane.stepping, False
        self.scaler.fired, self._observed = True, None
        self.unseen.step()
        watch.step, watch.closure = self._progress.steps[index], closure
        written = watch.versions.step_begins((index, watch.step))
        if lane is not None and lane.light.waited:
            self._or_no_step(index, lane.light.resolve)
        if lane is not None and lane.ready and lane.step_begins(watch.optimizers[index], written=written or closure):
            return
        if not closure:
            self._clearings.step_begins(index)
            if self._use.seen:
                self._use.put(watch.ledger, index, self._gradients.now())
            self._settle_before(index)

    def closure_ended(self, index: int) -> None:
        """The first evaluation of a closure is where the step starts from."""
        if self._observed is None:
            self._settle_before(index)

    def _skipped(self, index: int) -> None:
        """A GradScaler has left a step out."""
        self._end_step()
        self._use.step_ended(index, [])
        self._steps.skipped_outside(index)

    def _settle_before(self, index: int) -> None:
        self._or_no_step(index, self._backlog.settle)
        self._observed = seen = self._or_no_step(index, partial(self._steps.before, index))
        if self._lane is not None and not seen.skipped:
            self._lane.verify(seen.grad_norm, seen.grad_norm_clipped)

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

    def step_ended(self, index: int) -> None:
        """Measure what the step has done."""
        lane = self._lane
        if self._open[index] > 1 and is_part_of_another(self._watch.optimizers[index]):
            self._open[index] -= 1
            return
        self._open[index] = 0
        if lane is not None and lane.stepping:
            self._stepped = True
            if not self._watch.tap.calls:
                self._end_step()
            lane.step_ended(self._watch.optimizers[0])
            return
        self._watch.versions.step_ended()
        seen, self._observed = self._observed, None
        self._gradients.remember()
        self._clearings.step_ended(index)
        self._use.step_ended(index, self._gradients.state)
        try:
            if seen is None:
                # A closure that was never called: there is nothing to compare with.
                self._steps.count(index, self._steps.measure(index))
            elif seen.skipped:
                self._steps.skip(index, seen)
            else:
                self._steps.after(index, seen)
        finally:
            self._end_step()
        self.unseen.step_ended()
        watch = self._watch
        watch.inspection.step_ended(self._progress.step)
        watch.pace.doubt() if watch.inspection.active else watch.pace.step_ended()

    def _end_step(self) -> None:
        watch = self._watch
        self._stepped = True
        self._scale.step_ended()
        watch.scaling = watch.closure = False
        # The batch may be the output of another model, with all of its graph.
        watch.tap.inputs = None
        if watch.tap.order and not watch.tap.calls:
            # Where only methods of the model are called, no call of the model itself ever starts the order anew.
            self.unseen.saw_modules = True
            watch.tap.forget()

    def settle(self) -> None:
        """Have the steps judged that wait for it, and gradients that wait for clipping; raises what halts."""
        self._backlog.settle()
        if self._lane is not None:
            self._lane.light.resolve()

    def close(self) -> None:
        """Let go of what listens to the loop; may run twice."""
        if self._lane is not None:
            self._lane.close()

    def finish(self) -> None:
        """Complete what still waits, and let the guards say what is left to say."""
        self.settle()
        if (readings := self._steps.read()) and not self._watch.immediate:
            # A forward, or a backward, that no step has followed.
            self._steps.judge_early(readings)
        self._roster.finish()
