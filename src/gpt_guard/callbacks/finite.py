"""FiniteGuard: stop at the first NaN or infinity, and name the module, parameter or code that made it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.blame import blame
from gpt_guard.callbacks.finite_words import (
    bad_batch,
    bad_gradient,
    bad_loss,
    bad_output,
    bad_output_late,
    bad_parameter,
    mask_seen,
    scaler_stuck,
    step_made,
)
from gpt_guard.hooks.forward import Place
from gpt_guard.hooks.reach import reaches
from gpt_guard.hooks.state import StateWatch
from gpt_guard.hooks.tensors import describe, is_bad, looks_bad, readable, total, walk, watchable
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, TensorStats

# From its default scale of 65536 a healthy GradScaler is at 1 after 16 skips; a few more and nothing helps.
_STUCK_SCALER = 20


class FiniteGuard(Guard):
    """Halt on NaN or +inf in the batch, module outputs, loss, gradients, parameters or buffers, before the update.

    On the CPU each module output is tested where it is made, with one sum; an exact test confirms before anything is
    said, so finite values that only overflow the sum stay quiet. On an accelerator minimum and maximum of each input
    and output wait on the device and are read once, before `step()`. -inf without NaN or +inf is what masks look like:
    it is recorded (GG109), not halted on. Integer tensors have nothing to test; sharded ones are tested by their local
    part; quantized, nested and meta tensors are listed as not watched.

    - `ignore`: patterns of module paths whose outputs are not tested, e.g. `["head.*"]`; the rest is watched as usual.
    - `outputs`, `gradients`, `parameters`, `buffers`: what to watch; the loss always is.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.FORWARD, Moment.BEFORE_STEP, Moment.AFTER_STEP})

    def __init__(
        self,
        *,
        ignore: Iterable[str] = (),
        outputs: bool = True,
        gradients: bool = True,
        parameters: bool = True,
        buffers: bool = True,
    ) -> None:
        self.ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self.outputs = outputs
        self.gradients = gradients
        self.parameters = parameters
        self.buffers = buffers
        self._poisoned = False
        self._masks: set[int] = set()
        self._places: list[Place] = []
        self._skipped = 0
        self._grad_names: list[str] = []

    def attach(self, watch: Watch) -> None:
        """Look at parameters and buffers once, then hook the forward."""
        super().attach(watch)
        watch.forward_begins.append(self._forward_begins)
        watch.forward_ended.append(self._forward_ended)
        if self.outputs:
            watch.tap.watch_outputs(self._suspect, self.ignore)
        self._check_state_at_start()

    def detach(self) -> None:
        """Drop what belongs to this stretch of the run."""
        self._places = []
        self._poisoned = False
        super().detach()

    def blind_spots(self) -> Iterable[str]:
        """Ignored modules and tensors of a kind that cannot be tested."""
        return sorted(self.watch.tap.unwatched)

    def _check_state_at_start(self) -> None:
        watch = self.watch
        self._state = StateWatch(watch.model, parameters=self.parameters, buffers=self.buffers)
        for name, stats in self._state.settle().items():
            if name in watch.parameters and not stats.only_neg_inf:
                watch.submit(bad_parameter(watch, name, stats, Moment.START))

    # Forward, where reading is free.

    def _forward_begins(self) -> None:
        self._poisoned = False
        watch = self.watch
        if not watch.immediate or watch.tap.inputs is None:
            return
        args, kwargs = watch.tap.inputs
        for position, tensor in walk({**dict(enumerate(args)), **kwargs}):
            values = readable(tensor) if watchable(tensor) else None
            if values is None or math.isfinite(total(values).item()):
                continue
            if (stats := looks_bad(tensor)) is not None:
                self._poisoned = True
                watch.submit(bad_batch(watch, position, stats))
                return

    def _suspect(self, index: int, position: str, tensor: Tensor, inputs: Any) -> None:
        if self._poisoned or (stats := describe(tensor)) is None:
            return
        watch = self.watch
        if stats.only_neg_inf:
            if index not in self._masks:
                self._masks.add(index)
                watch.submit(mask_seen(watch, index, position, stats))
            return
        self._poisoned = True
        culprit = blame(watch.tap, index, tensor, inputs)
        if culprit.state is not None:
            self._state.ignore(culprit.state[0])
        watch.submit(bad_output(watch, culprit, index, position, stats))

    # Forward, where it is not: what waited is put into the ledger.

    def _forward_ended(self, _output: Any) -> None:
        if not self.watch.immediate and self.watch.evaluation:
            self._put_forward()

    def _put_forward(self) -> None:
        tap = self.watch.tap
        for place, value in enumerate(tap.waiting, start=len(self._places)):
            self.watch.ledger.put(f"finite.{place}", value)
        self._places.extend(tap.places)
        tap.waiting.clear()
        tap.places.clear()

    # Loss and gradients.

    def before_backward(self, loss: Tensor) -> None:
        """Test the loss itself before anything depends on it."""
        watch = self.watch
        if not watch.immediate:
            return
        stats = looks_bad(loss) or describe(loss)
        if stats is not None and not self._poisoned and reaches(loss, watch.tracked.values()):
            self._poisoned = True
            watch.submit(bad_loss(watch, loss.item() if loss.numel() == 1 else math.nan, stats))

    def after_backward(self) -> None:
        """Look at the gradients before clipping can spread one NaN to all of them."""
        watch = self.watch
        if not self.gradients or watch.grad_norms is None or watch.scaling:
            return
        if watch.immediate:
            self._judge_gradients(watch.grad_norms.names, watch.grad_norms.norms, watch.micro_batch)
        else:
            watch.ledger.put(f"finite.grads.{watch.micro_batch}", watch.grad_norms.norms)
            self._grad_names = watch.grad_norms.names

    def _judge_gradients(self, names: list[str], norms: list[float], micro_batch: int) -> None:
        if self._poisoned or all(norm - norm == 0.0 for norm in norms):
            return
        bad: dict[str, TensorStats] = {}
        for name, norm in zip(names, norms, strict=True):
            grad = self.watch.tracked[name].grad
            if norm - norm != 0.0 and grad is not None and (stats := describe(grad)) is not None:
                bad[name] = stats
        if bad:
            self._poisoned = True
            self.watch.submit(bad_gradient(self.watch, bad, micro_batch))

    # Steps.

    def before_step(self, optimizer: Optimizer) -> None:
        """Hand what waited to the host read that follows."""
        if not self.watch.immediate:
            self._put_forward()

    def after_step(self, optimizer: Optimizer) -> None:
        """One fused norm over parameters and float buffers: NaN and infinity survive it."""
        if (norms := self._state.norms()) is not None:
            self.watch.ledger.put("finite.state", norms)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """What the host read brought: forward and gradients before the step, parameters and buffers after it."""
        if seen.moment is Moment.AFTER_STEP:
            yield from self._judge_state(seen)
            self._poisoned = False
            return
        if seen.skipped:
            self._skipped += 1
            if self._skipped == _STUCK_SCALER:
                yield scaler_stuck(self.watch, self._skipped)
        elif seen.moment is Moment.BEFORE_STEP:
            self._skipped = 0
        if not self.watch.immediate:
            yield from self._judge_late(seen)

    def _judge_late(self, seen: Observation) -> Iterable[Finding]:
        places, self._places = self._places, []
        for number, place in enumerate(places):
            extremes = seen.readings.get(f"finite.{number}")
            if extremes is not None and is_bad(*extremes) and not self._poisoned:
                self._poisoned = True
                yield bad_output_late(self.watch, places, number, extremes, evaluation=seen.evaluation)
        if self._poisoned:
            return
        if seen.loss is not None and not math.isfinite(seen.loss):
            self._poisoned = True
            yield bad_loss(self.watch, seen.loss, None, where=None)
            return
        for name, norms in seen.readings.items():
            if name.startswith("finite.grads."):
                self._judge_gradients(self._grad_names, norms, int(name.rpartition(".")[2]))

    def _judge_state(self, seen: Observation) -> Iterable[Finding]:
        for name, stats in self._state.turned_bad(seen.readings.get("finite.state", [])).items():
            yield step_made(self.watch, name, stats, seen)
