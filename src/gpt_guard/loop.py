"""The loop as gpt_guard sees it: notices each moment, reads the ledger once per step, and asks the guards."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.desk import Desk
from gpt_guard.errors import GuardError
from gpt_guard.hooks.gradients import Gradients
from gpt_guard.hooks.optimizer import unwrap
from gpt_guard.hooks.scaler import GradScaler
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.ledger import Readings
from gpt_guard.observing import complete, observe, put_lr
from gpt_guard.progress import Progress
from gpt_guard.records import Moment, Observation
from gpt_guard.roster import Roster

_BEFORE, _AFTER = "before", "after"


class Loop:
    """Listens to forward, backward, optimizer and scaler.

    What is measured before a step is read just before it; what is measured after it is read at once where reading is
    free, and together with the next step otherwise: until then its observation is `pending`.
    """

    def __init__(self, watch: Watch, roster: Roster, desk: Desk, progress: Progress) -> None:
        self.evaluating = False
        self.backwards = 0
        self._watch = watch
        self._roster = roster
        self._desk = desk
        self._progress = progress
        self._gradients = Gradients(watch.tracked)
        self._several = len(watch.optimizers) > 1
        self._depth = 0
        self._loss: Tensor | None = None
        self._stepped = False
        self._stepping = 0
        self._unit: Tensor | None = None
        self._fired = False
        self._step_time: float | None = None
        self._observed: Observation | None = None
        self._pending: Observation | None = None
        self._clock = time.perf_counter()
        watch.ledger.label = _BEFORE

    # Forward: calls of the model itself.

    def forward_begins(self) -> None:
        """Note whether this is training or evaluation, and how much data it takes."""
        watch = self._watch
        watch.evaluation = self.evaluating or not torch.is_grad_enabled()
        if not watch.evaluation:
            self._count_samples()
        for listener in watch.forward_begins:
            listener()

    def _count_samples(self) -> None:
        for _, tensor in walk(self._watch.tap.inputs):
            if tensor.dim():
                self._progress.samples += tensor.shape[0]
                if tensor.dim() >= 2 and not tensor.is_floating_point():
                    self._progress.tokens += tensor.shape[0] * tensor.shape[1]
                return

    def forward_ended(self, output: Any) -> None:
        """An evaluation forward is read when it ends, since no step will come to read it."""
        for listener in self._watch.forward_ended:
            listener(output)
        if self._watch.evaluation and not self._watch.immediate:
            readings = self._read()
            self._roster.judge(
                Observation(step=self._watch.step, moment=Moment.FORWARD, evaluation=True, readings=readings)
            )

    # Backward: every one in the process; ours is one that changes gradients of ours.

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Reentrant checkpointing calls backward inside backward: only the outermost call counts."""
        self._depth += 1
        if self._depth > 1:
            return
        watch = self._watch
        watch.tap.paused = True
        cleared = self._gradients.mark()
        if self._stepped or (cleared and watch.micro_batch):
            self._begin_step()
        loss = losses[0] if len(losses) == 1 else torch.stack([each.detach().float().sum() for each in losses]).sum()
        self._loss = loss if self._unit is None else loss / self._unit
        self._roster.call("before_backward", self._loss)

    def _begin_step(self) -> None:
        self._stepped = False
        self._watch.ledger.drop("loss.")
        self._watch.micro_batch = 0
        self._watch.grad_norms = None

    def backward_ended(self, losses: tuple[Tensor, ...]) -> None:
        """Measure the gradients, if this backward was ours."""
        self._depth -= 1
        if self._depth > 0:
            return
        watch, loss = self._watch, self._loss
        watch.tap.paused, self._loss = False, None
        if not self._gradients.touched():
            return
        self.backwards += 1
        if loss is not None and loss.numel() == 1:
            watch.ledger.put(f"loss.{watch.micro_batch}", loss.detach().reshape(()))
        watch.micro_batch += 1
        watch.grad_norms = self._gradients.measure(self._unit, immediate=watch.immediate)
        self._roster.call("after_backward")
        if watch.closure and self._observed is None:
            self._settle_before(self._stepping)

    def backward_failed(self) -> None:
        """The backward raised, or a guard halted: be ready for the next one."""
        self._depth = 0
        self._watch.tap.paused = False
        self._loss = None

    # GradScaler: its scale is taken out of every figure, and a step it skips is not a step.

    def loss_scaled(self, scaler: GradScaler, outputs: Any, scaled: Any) -> None:
        """Keep the scale as a tensor on its device: scaling a one gives it through the public interface."""
        if self._unit is None and isinstance(outputs, Tensor):
            self._unit = torch.ones((), device=outputs.device)
            self._unit = scaler.scale(self._unit)
        self._watch.scaling = self._unit is not None

    def scaler_steps(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """A step may follow, or be skipped."""
        self._fired = False

    def scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """If none of our steps fired in between, the scaler has skipped it."""
        ours = [index for index, own in enumerate(self._watch.optimizers) if own is unwrap(optimizer)[0]]
        if ours and not self._fired:
            put_lr(self._watch.ledger, self._watch.optimizers[ours[0]])
            self._watch.grad_norms = None
            seen = self._observe(ours[0], self._read(), skipped=True)
            self._progress.skipped += 1
            self._desk.observe(seen)
            self._roster.judge(seen)
            self._end_step()

    # Optimizer.

    def step_begins(self, index: int, *, closure: bool) -> None:
        """Read and judge before anything changes; with a closure the gradients come later, from inside the step."""
        watch = self._watch
        self._fired = True
        self._stepping, self._observed = index, None
        watch.step = self._progress.steps[index]
        watch.closure = closure
        self._roster.call("before_step", watch.optimizers[index])
        if not closure:
            self._settle_before(index)

    def _settle_before(self, index: int) -> None:
        watch = self._watch
        optimizer = watch.optimizers[index]
        put_lr(watch.ledger, optimizer)
        if watch.grad_norms is not None:
            watch.ledger.put("grad_norms", watch.grad_norms.norms)
        applied = None
        if watch.grad_norms is None or self._gradients.touched():
            # A fused optimizer takes the scale out inside its step, through this attribute.
            applied = self._gradients.measure(getattr(optimizer, "grad_scale", None), immediate=watch.immediate)
            watch.ledger.put("grad_norms.applied", applied.norms)
        seen = self._observe(index, self._read(), applied=applied.names if applied else None)
        self._observed = seen
        self._progress.latest = seen
        try:
            self._roster.judge(seen)
        except GuardError:
            self._desk.observe(seen)
            raise

    def _observe(self, index: int, readings: Readings, **how: Any) -> Observation:
        watch, progress = self._watch, self._progress
        after = watch.grad_norms
        return observe(
            readings,
            after.names if after else [],
            how.pop("applied", None),
            set(watch.held_by(index)) if self._several else None,
            step=progress.steps[index],
            moment=Moment.BEFORE_STEP,
            optimizer=index,
            micro_batches=watch.micro_batch,
            tokens=progress.tokens or None,
            samples=progress.samples or None,
            **how,
        )

    def step_ended(self, index: int) -> None:
        """Measure what the step has done."""
        watch = self._watch
        if self._observed is None:
            self._settle_before(index)
        watch.ledger.label = _AFTER
        self._roster.call("after_step", watch.optimizers[index])
        watch.ledger.label = _BEFORE
        self._pending, self._observed = self._observed, None
        self._progress.steps[index] += 1
        self._end_step()
        if watch.immediate:
            self._read()

    def _end_step(self) -> None:
        now = time.perf_counter()
        self._step_time, self._clock = now - self._clock, now
        self._stepped = True
        self._unit = None
        self._watch.scaling = self._watch.closure = False
        self._watch.step = self._progress.step

    def _read(self) -> Readings:
        """The one host read: returns what was measured before the step, completes the step before it."""
        found = self._watch.ledger.read()
        if self._pending is not None:
            seen, self._pending = complete(self._pending, found.get(_AFTER, {}), self._step_time), None
            self._progress.finish(seen)
            self._desk.observe(seen)
            self._roster.judge(seen)
        return found.get(_BEFORE, {})

    def finish(self) -> None:
        """Complete what still waits, and let the guards say what is left to say."""
        self._read()
        self._roster.finish()
