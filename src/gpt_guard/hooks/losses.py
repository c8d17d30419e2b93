"""The loss that `backward()` is called on: several become one, and a GradScaler's scale is taken out."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpt_guard.hooks.scaler import GradScaler
from gpt_guard.hooks.tensors import walk


def joint(losses: tuple[Tensor, ...]) -> Tensor | None:
    """One loss as it is; the sum of several, part of the same graph, on the device of the first; None without any."""
    if len(losses) < 2:
        return losses[0] if losses else None
    device = losses[0].device
    return torch.stack([loss.sum().to(device) for loss in losses]).sum()


class LossScale:
    """The scale on the gradients of the step being prepared; None where nobody scales.

    A scale is offered by `scaler.scale(loss)` and belongs to the backward that follows. Another model's backward takes
    its own scale away with it; ours keeps it until the step, since accumulated gradients must share one scale.

    The loss as it was before scaling is remembered beside the scaled one: that may overflow where the loss is fine.
    """

    def __init__(self) -> None:
        self.unit: Tensor | None = None
        self.fresh = False
        self._offered: Tensor | None = None
        self._kept: Tensor | None = None
        self._given: list[weakref.ref[Tensor]] = []
        # Weak keys: what was scaled and never used goes as it would have gone.
        self._before = WeakTensorKeyDictionary()

    def offer(self, scaler: GradScaler, outputs: Any, scaled: Any) -> None:
        """Take note of a scale, as a tensor on its device: scaling a one gives it through the public interface."""
        pairs = list(zip(walk(outputs), walk(scaled), strict=False))
        for (_, before), (_, after) in pairs:
            self._before[after] = before
            # The scaled one may be thrown away at once, and its entry with it.
            self._given.append(weakref.ref(before))
        if pairs:
            self._offered = scaler.scale(torch.ones((), device=pairs[0][0][1].device))

    def backward_begins(self, losses: tuple[Tensor, ...] = ()) -> None:
        """A scale that was just offered is that of this backward; otherwise it is still that of the step.

        Not where backward is called on the very loss that was given to `scale()`, instead of what that returned.
        """
        self.fresh = self._offered is not None and not self._unscaled(losses)
        self.unit = self._offered if self.fresh else self._kept
        self._offered = None

    def _unscaled(self, losses: tuple[Tensor, ...]) -> bool:
        given = [reference() for reference in self._given]
        self._given.clear()
        return bool(losses) and all(any(loss is each for each in given) for loss in losses)

    @property
    def offered(self) -> Tensor | None:
        """The scale that waits for its backward."""
        return self._offered

    def backward_ended(self, *, ours: bool) -> None:
        """Keep the scale if our gradients now carry it."""
        if ours:
            self._kept = self.unit
        else:
            self.unit = self._kept

    def step_ended(self) -> None:
        """The next step may have another scale."""
        self.unit = self._kept = None

    def loss(self, losses: tuple[Tensor, ...]) -> Tensor | None:
        """The joint loss as it was before scaling; reads nothing."""
        if self.unit is None:
            return joint(losses)
        before = [self._before.get(loss) for loss in losses]
        if all(isinstance(loss, Tensor) for loss in before):
            return joint(tuple(before))
        scaled = joint(losses)
        return None if scaled is None else scaled / self.unit
