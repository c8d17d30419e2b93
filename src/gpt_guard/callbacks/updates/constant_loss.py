"""Whether the loss is the same number in every step, although weights move and batches differ."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from gpt_guard.callbacks.updates.sampling import StepFigures
from gpt_guard.catalogue import finding
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

_STEPS = 5
_SAME = 1e-5
# What gradient and step, multiplied, could have changed at most; far below it, a loss that stays is no wonder.
_COULD_CHANGE = 1e-3
BATCH = "constant_loss.batch"


class ConstantLoss:
    """Counts steps in a row with an equal loss; from the third on, a sum over the batch tells whether that differs.

    Zero, whole numbers and numbers that half precision can hold are left out: rounding makes these equal. So are steps
    that are too small to change the loss. `reported` holds what was told already, and is added to.
    """

    def __init__(self, reported: set[str]) -> None:
        self._reported = reported
        self._value = 0.0
        self._equal = 0
        self._batches: list[float] = []
        self._calls = 0
        self._batch: Tensor | None = None
        self._without_graph = 0

    def before_backward(self, watch: Watch) -> None:
        """Note how often the model was called for this loss, and measure the batch where a loss is suspected."""
        calls, self._calls = watch.tap.calls - self._calls, watch.tap.calls
        self._without_graph = max(0, calls - watch.forwards)
        if self._equal < 2 or "GG629" in self._reported or watch.tap.inputs is None:
            return
        first = next((tensor for _, tensor in walk(watch.tap.inputs)), None)
        if type(first) is Tensor and not first.is_complex() and first.layout is torch.strided:
            with torch.no_grad():
                # Weighted by place: a batch in another order is another one.
                flat = first.detach().flatten().float()
                place = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float32)
                self._batch = (flat * place.sqrt()).sum()

    def after_step(self, watch: Watch) -> None:
        """Have the host read what was measured, together with the figures of the step."""
        if self._batch is not None:
            watch.ledger.put(BATCH, self._batch)
            self._batch = None

    def judge(self, seen: Observation, figures: StepFigures) -> Finding | None:
        """Take in one step; GG629 once it is sure."""
        loss, grad_norm, ratio = seen.loss, seen.grad_norm or 0.0, seen.update_ratio or 0.0
        if loss is None or not _is_telling(loss) or grad_norm * ratio * figures.held < _COULD_CHANGE * abs(loss):
            self._equal, self._batches = 0, []
            return None
        if self._equal and abs(loss - self._value) <= _SAME * abs(loss):
            self._equal += 1
        else:
            self._value, self._equal, self._batches = loss, 1, []
        if BATCH in seen.readings:
            self._batches.append(seen.readings[BATCH])
        # Three batches were measured by then.
        if self._equal < _STEPS or len(set(self._batches)) < 3 or "GG629" in self._reported:
            return None
        self._reported.add("GG629")
        calls = self._without_graph
        again = f" For each loss the model is called without gradients too ({calls} times)." if calls else ""
        return finding(
            "GG629",
            f"The loss is {loss:.7g} in each of the last {self._equal} steps, with other batches each time, while the "
            f"gradient norm is {number(grad_norm)} and each step changes the weights by {number(ratio)} of their norm."
            f"{again}",
            likely=["same_model"] if self._without_graph else [],
            step=seen.step,
            moment=Moment.AFTER_STEP,
            evidence={"loss": loss, "steps": self._equal, "without_gradients": self._without_graph},
            cause_id="constant loss",
        )

    def close(self) -> None:
        """Drop every reference to tensors, and begin anew."""
        self._batch = None
        self._equal = self._calls = 0
        self._batches = []


def _is_telling(loss: float) -> bool:
    """Whether equal numbers like this one are no accident of rounding."""
    if loss == 0.0 or loss - loss != 0.0 or loss == round(loss):
        return False
    try:
        bits = int.from_bytes(struct.pack(">f", loss), "big")
    except OverflowError:
        return False
    # bfloat16 keeps 7 bits after the first, float16 10: the 13 lowest of float32 are zero in both.
    return bool(bits & 0x1FFF)
