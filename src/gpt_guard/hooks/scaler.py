"""Notice a GradScaler that the loop uses, whether or not Guardian was told of it.

Its scale must be taken out of losses and gradient norms, and the steps it skips on overflow are healthy: the optimizer's
own hooks do not fire on them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from gpt_guard.hooks.patches import Patch

GradScaler = torch.amp.GradScaler


class ScalerListener(Protocol):
    """Who is told what GradScalers do."""

    def loss_scaled(self, scaler: GradScaler, outputs: Any, scaled: Any) -> None:
        """`scaler.scale(outputs)` returned `scaled`."""

    def scaler_steps(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """`scaler.step(optimizer)` begins."""

    def scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """`scaler.step(optimizer)` returned, with or without a step."""


def _around_scale(original: Any, listeners: tuple[ScalerListener, ...], scaler: GradScaler, outputs: Any) -> Any:
    scaled = original(scaler, outputs)
    if scaler.is_enabled():
        for listener in listeners:
            listener.loss_scaled(scaler, outputs, scaled)
    return scaled


def _around_step(
    original: Any, listeners: tuple[ScalerListener, ...], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kw: Any
) -> Any:
    if not scaler.is_enabled():
        return original(scaler, optimizer, *args, **kw)
    for listener in listeners:
        listener.scaler_steps(scaler, optimizer)
    result = original(scaler, optimizer, *args, **kw)
    for listener in listeners:
        listener.scaler_stepped(scaler, optimizer)
    return result


SCALE = Patch(GradScaler, "scale", _around_scale)
SCALER_STEP = Patch(GradScaler, "step", _around_step)


def patches(scaler: Any) -> tuple[Patch, ...]:
    """What to patch to notice all scalers: torch's class, and the class of `scaler` if it has methods of its own."""
    own = type(scaler)
    if scaler is None or (own.scale is GradScaler.scale and own.step is GradScaler.step):
        return (SCALE, SCALER_STEP)
    if own not in _OWN:
        _OWN[own] = (Patch(own, "scale", _around_scale), Patch(own, "step", _around_step))
    return (SCALE, SCALER_STEP, *_OWN[own])


_OWN: dict[type, tuple[Patch, Patch]] = {}
