"""What happens round a step: measure and read before it, judge, complete the observation after it."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.errors import GuardError
from gpt_guard.hooks.gradients import Gradients, GradNorms
from gpt_guard.hooks.ledger import Readings
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Moment, Observation
from gpt_guard.runtime.dispatch import Desk
from gpt_guard.runtime.guard_runner import Roster
from gpt_guard.runtime.observing import complete, observe, put_lr
from gpt_guard.runtime.progress import Progress

_BEFORE, _AFTER = "before", "after"


class Steps:
    """Makes the observation of each step, and has the guards judge it before and after.

    What is measured before a step is read just before it; what is measured after it is read at once where reading is
    free, and together with the next step otherwise: until then its observation is `pending`.
    """

    def __init__(self, watch: Watch, gradients: Gradients, roster: Roster, desk: Desk, progress: Progress) -> None:
        self._watch = watch
        self._gradients = gradients
        self._roster = roster
        self._desk = desk
        self._progress = progress
        self._several = len(watch.optimizers) > 1
        self._losses: Readings = {}
        self._kept: Readings = {}
        self._pending: Observation | None = None
        self._step_time: float | None = None
        self._clocks = [time.perf_counter()] * len(watch.optimizers)
        watch.ledger.label = _BEFORE

    def begin(self) -> None:
        """A new step is being prepared: the losses of the last one no longer count."""
        self._losses = {}
        if self._kept:
            self._kept = {name: value for name, value in self._kept.items() if not name.startswith("loss.")}
        self._watch.ledger.drop("loss.")

    def before(self, index: int) -> Observation:
        """Measure, read and judge, before anything changes; raises what halts."""
        self._roster.call("before_step", self._watch.optimizers[index])
        seen = self.measure(index)
        if not seen.skipped:
            self._progress.latest = seen
            try:
                self._roster.judge(seen)
            except GuardError:
                self._desk.observe(seen)
                raise
        self._watch.capture.judged()
        return seen

    def measure(self, index: int) -> Observation:
        """Learning rates, loss and gradient norms as they are now, with all that waits in the ledger."""
        watch = self._watch
        optimizer = watch.optimizers[index]
        put_lr(watch.ledger, optimizer)
        # A fused optimizer takes the scale out inside its step, through this attribute.
        unit = getattr(optimizer, "grad_scale", None)
        if watch.grad_norms is None:
            applied: GradNorms | None = self._gradients.measure(unit, immediate=watch.immediate)
        else:
            watch.ledger.put("grad_norms", watch.grad_norms.norms)
            applied = self._gradients.applied(watch.grad_norms, unit, immediate=watch.immediate)
        if applied is not None:
            watch.ledger.put("grad_norms.applied", applied.norms)
        # A fused optimizer also skips by itself what a GradScaler found to overflow.
        if isinstance(found := getattr(optimizer, "found_inf", None), Tensor):
            watch.ledger.put("found_inf", found)
        readings = self._rest()
        if readings.pop("found_inf", False):
            return self._overflowed(index, readings)
        return self._observe(index, readings, applied.names if applied else None, skipped=False)

    def _overflowed(self, index: int, readings: Readings) -> Observation:
        """The observation of a step that is not made, for the sake of its gradients: it has no figures of theirs."""
        self._watch.grad_norms = None
        kept = {name: value for name, value in readings.items() if not name.startswith("grad_norms")}
        return self._observe(index, kept, None, skipped=True)

    def _observe(self, index: int, readings: Readings, applied: list[str] | None, *, skipped: bool) -> Observation:
        watch, progress = self._watch, self._progress
        # Read with the first of several optimizers, true for all of them.
        losses = self._losses
        for name in readings:
            if name.startswith("loss."):
                losses[name] = readings[name]
        return observe(
            readings | losses,
            watch.grad_norms.names if watch.grad_norms else [],
            applied,
            set(watch.held_by(index)) if self._several else None,
            step=progress.steps[index],
            moment=Moment.BEFORE_STEP,
            optimizer=index,
            micro_batches=watch.micro_batch,
            tokens=progress.tokens or None,
            samples=progress.samples or None,
            skipped=skipped,
        )

    def after(self, index: int, seen: Observation) -> None:
        """Measure what the step has done."""
        self._watch.ledger.label = _AFTER
        try:
            self._roster.call("after_step", self._watch.optimizers[index])
        finally:
            self._watch.ledger.label = _BEFORE
            self.count(index, seen)

    def count(self, index: int, seen: Observation) -> None:
        """The step was made; what waits is read with the next one, or now where reading is free."""
        self._pending = seen
        self._progress.steps[index] += 1
        self._tick(index)
        self._watch.capture.step_ended()
        if self._watch.immediate:
            self.read()

    # Light steps: Lane measures them, Backlog makes their observations.

    def begin_light(self, loss: float) -> None:
        """As `begin`, with the loss at hand; it is there too if the step is measured in full after all."""
        if self._kept:
            self.begin()
        self._losses = {"loss.0": loss}

    def measure_light(self, optimizer: Optimizer) -> Readings:
        """Measure what a step has done; gives what the guards have put into the ledger."""
        ledger = self._watch.ledger
        ledger.label = _AFTER
        try:
            self._roster.call_light("after_step", optimizer)
        finally:
            ledger.label = _BEFORE
        return ledger.read().get(_AFTER, {})

    def count_light(self) -> float:
        """The step was made; gives its time."""
        watch, progress, now = self._watch, self._progress, time.perf_counter()
        progress.steps[0] = watch.step = progress.steps[0] + 1
        step_time, self._clocks[0] = now - self._clocks[0], now
        watch.capture.step_ended()
        return step_time

    def skipped_outside(self, index: int) -> None:
        """A GradScaler did not call `step()`."""
        put_lr(self._watch.ledger, self._watch.optimizers[index])
        self.skip(index, self._overflowed(index, self._rest()))

    def skip(self, index: int, seen: Observation) -> None:
        """Not a step: told and judged, not counted."""
        self._progress.latest = seen
        self._progress.skipped += 1
        self._tick(index)
        self._desk.observe(seen)
        try:
            self._roster.judge(seen)
        finally:
            # The parameters have not changed: until it was judged, the step could be run again.
            self._watch.capture.step_ended()

    def _tick(self, index: int) -> None:
        now = time.perf_counter()
        self._step_time, self._clocks[index] = now - self._clocks[index], now
        self._watch.step = self._progress.step

    def early(self) -> Readings:
        """Read before the step is reached, as an evaluation needs it; what belongs to the step is kept for it."""
        readings = self.read()
        self._kept |= readings
        return readings

    def judge_early(self, readings: Readings, *, evaluation: bool = False) -> None:
        """Have judged what was read before a step was reached."""
        step, moment = self._watch.step, Moment.FORWARD
        self._roster.judge(Observation(step=step, moment=moment, evaluation=evaluation, readings=readings))

    def unstepped(self) -> Readings:
        """As `early`, where no step may ever come to use what is kept: only the losses are."""
        readings = self.read()
        self._kept |= {name: value for name, value in readings.items() if name.startswith("loss.")}
        return readings

    def _rest(self) -> Readings:
        kept, self._kept = self._kept, {}
        return kept | self.read() if kept else self.read()

    def read(self) -> Readings:
        """The one host read: returns what was measured before the step, completes the step before it."""
        found = self._watch.ledger.read()
        if self._pending is not None:
            seen, self._pending = complete(self._pending, found.get(_AFTER, {}), self._step_time), None
            self._progress.finish(seen)
            self._desk.observe(seen)
            self._roster.judge(seen)
        before: dict[str, Any] = found.get(_BEFORE, {})
        return before
