"""The record of a step: measured and read before it, judged, completed after it."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.errors import GuardError
from gpt_guard.hooks.gradients import Gradients, GradNorms, total_norm
from gpt_guard.hooks.ledger import Ledger, Readings
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Moment, Observation
from gpt_guard.runtime.dispatch import Dispatch
from gpt_guard.runtime.guard_runner import GuardRunner
from gpt_guard.runtime.progress import Progress

_BEFORE, _AFTER = "before", "after"
# Norms taken twice of the same gradients differ by rounding only; clipping that matters changes them by more.
_CLIP_TOLERANCE = 1e-4


class StepRecords:
    """Makes the observation of each step, and has the guards judge it before and after.

    What is measured before a step is read just before it; what is measured after it is read at once where reading is
    free, and together with the next step otherwise: until then its observation is `pending`.
    """

    def __init__(
        self, watch: Watch, gradients: Gradients, guards: GuardRunner, dispatch: Dispatch, progress: Progress
    ) -> None:
        self._watch = watch
        self._gradients = gradients
        self._guards = guards
        self._dispatch = dispatch
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
        self._guards.call("before_step", self._watch.optimizers[index])
        seen = self.measure(index)
        if not seen.skipped:
            self._progress.latest = seen
            try:
                self._guards.judge(seen)
            except GuardError:
                self._dispatch.observe(seen)
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
            self._guards.call("after_step", self._watch.optimizers[index])
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

    def skipped_outside(self, index: int) -> None:
        """A GradScaler did not call `step()`."""
        put_lr(self._watch.ledger, self._watch.optimizers[index])
        self.skip(index, self._overflowed(index, self._rest()))

    def skip(self, index: int, seen: Observation) -> None:
        """Not a step: told and judged, not counted."""
        self._progress.latest = seen
        self._progress.skipped += 1
        self._tick(index)
        self._dispatch.observe(seen)
        try:
            self._guards.judge(seen)
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
        self._guards.judge(Observation(step=step, moment=moment, evaluation=evaluation, readings=readings))

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
            self._dispatch.observe(seen)
            self._guards.judge(seen)
        before: dict[str, Any] = found.get(_BEFORE, {})
        return before


def put_lr(ledger: Ledger, optimizer: Optimizer) -> None:
    """Put the learning rate of each group into the ledger; a tensor lr stays on its device until the read."""
    for place, group in enumerate(optimizer.param_groups):
        lr = group["lr"] if "lr" in group else float("nan")
        ledger.put(f"lr.{place}", lr if isinstance(lr, Tensor) else float(lr))


def batch_size(inputs: Any) -> tuple[int, int]:
    """Samples and tokens in what a model was called with: the first tensor's rows, and its elements if they are ids.

    Ids are integers of shape `[B, T]`; images and other data have no tokens.
    """
    # The usual call, model(x, ...), without the general walk.
    first = inputs[0][0] if type(inputs) is tuple and inputs and type(inputs[0]) is tuple and inputs[0] else None
    for _, tensor in (("", first),) if type(first) is Tensor and first.dim() else walk(inputs):
        if tensor.dim():
            ids = tensor.dim() == 2 and not (tensor.is_floating_point() or tensor.is_complex())
            return tensor.shape[0], tensor.numel() if ids else 0
    return 0, 0


def observe(
    readings: Readings, after: list[str], applied: list[str] | None, names: set[str] | None, **facts: Any
) -> Observation:
    """The observation of a step from its readings.

    `after` and `applied` name the parameters whose norms stand in `grad_norms` (taken after backward) and
    `grad_norms.applied` (just before the step; None if nothing has touched the gradients since). `names` restricts
    both to the parameters this optimizer steps. `facts` are the fields known without the device.
    """
    values = readings.pop("grad_norms", ())
    norms = _named(after, values, names)
    # A list is unpacked in a sixth of the time that the values of a dict take.
    grad_norm = total_norm(values if names is None else norms.values()) if norms else None
    clipped_norm = grad_norm
    if applied is not None:
        values = readings.pop("grad_norms.applied", ())
        # Only their total is wanted, unless there are no others.
        if grad_norm is None or names is not None:
            now = _named(applied, values, names)
            values = now.values()
        clipped_norm = total_norm(values) if values else None
        if grad_norm is None:
            norms, grad_norm = now, clipped_norm
    losses: list[float] = []
    lr: list[float] = []
    rest: Readings = {}
    for name, value in readings.items():
        if name.startswith("loss."):
            losses.append(value)
        elif name.startswith("lr."):
            lr.append(value)
        else:
            rest[name] = value
    fields = _BLANK.__dict__ | facts
    fields["loss"] = float(sum(losses)) if losses else None
    fields["lr"] = tuple(lr)
    fields["grad_norm"] = grad_norm
    fields["grad_norm_clipped"] = clipped_norm
    fields["clipped"] = _clipped(grad_norm, clipped_norm)
    fields["grad_norms"] = norms
    fields["readings"] = rest
    fields["metrics"] = {}
    return _made_of(fields)


_BLANK = Observation(step=0, moment=Moment.BEFORE_STEP)
_ALL_FIELDS = set(Observation.model_fields)


# The slots of a pydantic model; to look them up each time takes as long as to fill them.
_new = Observation.__new__
_put_fields = BaseModel.__dict__["__dict__"].__set__
_put_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_put_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_put_private = BaseModel.__dict__["__pydantic_private__"].__set__


def _made_of(fields: dict[str, Any]) -> Observation:
    """What `model_copy(update=...)` makes, in a fifth of its time: it runs twice a step, and checks nothing either."""
    made = _new(Observation)
    _put_fields(made, fields)
    _put_names(made, _ALL_FIELDS)
    _put_extra(made, None)
    _put_private(made, None)
    return made


def _named(names: list[str], norms: list[float], keep: set[str] | None) -> dict[str, float]:
    if keep is None:
        return dict(zip(names, norms, strict=True))
    return {name: norm for name, norm in zip(names, norms, strict=True) if name in keep}


def _clipped(before: float | None, after: float | None) -> bool | None:
    if before is None or after is None:
        return None
    return after < before * (1.0 - _CLIP_TOLERANCE)


def complete(seen: Observation, after: Readings, step_time: float | None) -> Observation:
    """The same observation with what was measured after the step."""
    fields = seen.__dict__.copy()
    fields["moment"] = Moment.AFTER_STEP
    fields["update_ratio"] = after.pop("update_ratio", None)
    fields["max_update"] = after.pop("max_update", None)
    fields["step_time"] = step_time
    fields["readings"] = after
    return _made_of(fields)
