"""What GradScalers do: their scale is taken out of every figure, and a step that one leaves out is not a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpt_guard.hooks.gradients import Gradients
from gpt_guard.hooks.losses import LossScale
from gpt_guard.hooks.optimizer import innermost
from gpt_guard.hooks.scaler import GradScaler
from gpt_guard.hooks.scaler_use import ScalerUse
from gpt_guard.hooks.watch import Watch
from gpt_guard.runtime.blind_spots import Unseen


class ScalerEvents:
    """Listens to GradScalers; `fired` tells that one of our steps has begun since one was asked to step.

    `skipped(index)` is called for an optimizer whose step was left out.
    """

    def __init__(self, watch: Watch, gradients: Gradients, unseen: Unseen, skipped: Callable[[int], None]) -> None:
        self.scale = LossScale()
        self.use = ScalerUse()
        self.fired = False
        self._watch = watch
        self._gradients = gradients
        self._unseen = unseen
        self._skipped = skipped

    def loss_scaled(self, scaler: GradScaler, outputs: Any, scaled: Any) -> None:
        """Keep the scale for the backward that follows."""
        self.scale.offer(scaler, outputs, scaled)
        self.use.scaled(self.scale.offered)

    def _own(self, optimizer: Any) -> int | None:
        inner = innermost(optimizer)
        return next((index for index, own in enumerate(self._watch.optimizers) if own is inner), None)

    def scaler_unscales(self, optimizer: Any) -> None:
        """From here on the gradients of this optimizer are the true ones."""
        if (index := self._own(optimizer)) is not None:
            self.use.unscales(index)

    def scaler_steps(self, optimizer: Any) -> None:
        """A step may follow, or be skipped."""
        self.fired = False
        if (index := self._own(optimizer)) is not None:
            self._unseen.scaler_called()
            self.use.scaler_steps(index, self._gradients.now())

    def scaler_stepped(self, optimizer: Any) -> None:
        """If none of our steps fired in between, the scaler has skipped it."""
        index = self._own(optimizer)
        if index is not None and not self.fired:
            self._unseen.step()
            self._skipped(index)
        self.use.scaler_stepped()
