"""Notice a GradScaler that the loop uses, whether or not Guardian was told of it.

Its scale must be taken out of losses and gradient norms, and the steps it skips on overflow are healthy: hooks of the
optimizer itself do not fire on them.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.patches import Patch

GradScaler = torch.amp.GradScaler


class ScalerListener(Protocol):
    """Who is told what GradScalers do."""

    def loss_scaled(self, scaler: GradScaler, outputs: Any, scaled: Any) -> None:
        """`scaler.scale(outputs)` returned `scaled`."""

    def scaler_steps(self, optimizer: Any) -> None:
        """`scaler.step(optimizer)` begins."""

    def scaler_stepped(self, optimizer: Any) -> None:
        """`scaler.step(optimizer)` returned, with or without a step."""


class _Local(threading.local):
    inside = False


_LOCAL = _Local()


def _around_scale(original: Any, listeners: tuple[ScalerListener, ...], scaler: GradScaler, outputs: Any) -> Any:
    if _LOCAL.inside or not scaler.is_enabled():
        return original(scaler, outputs)
    # A subclass may call the method of its base, and a listener may scale a number of its own: one call is one event.
    _LOCAL.inside = True
    try:
        scaled = original(scaler, outputs)
        for listener in listeners:
            listener.loss_scaled(scaler, outputs, scaled)
    finally:
        _LOCAL.inside = False
    return scaled


def _around_step(
    original: Any,
    listeners: tuple[ScalerListener, ...],
    scaler: GradScaler,
    optimizer: Optimizer,
    *args: Any,
    **kw: Any,
) -> Any:
    if _LOCAL.inside or not scaler.is_enabled():
        return original(scaler, optimizer, *args, **kw)
    _LOCAL.inside = True
    try:
        for listener in listeners:
            listener.scaler_steps(optimizer)
        result = original(scaler, optimizer, *args, **kw)
        for listener in listeners:
            listener.scaler_stepped(optimizer)
    finally:
        _LOCAL.inside = False
    return result


SCALE = Patch(GradScaler, "scale", _around_scale)
SCALER_STEP = Patch(GradScaler, "step", _around_step)


def checked_scaler(scaler: Any) -> Any:
    """The scaler, if it has what a GradScaler has. Raises GuardUsageError otherwise."""
    missing = [name for name in ("scale", "step", "is_enabled") if not callable(getattr(scaler, name, None))]
    if scaler is not None and missing:
        raise GuardUsageError(
            f"scaler is a {type(scaler).__name__} without {', '.join(missing)}(); give a torch.amp.GradScaler or "
            f"something that works like one, or leave it out: torch's own scalers are noticed by themselves"
        )
    return scaler


def patches(scaler: Any) -> tuple[Patch, ...]:
    """What to patch to notice all scalers: torch's class, and the class of `scaler` if it has methods of its own."""
    own = type(scaler)
    if scaler is None or (own.scale is GradScaler.scale and own.step is GradScaler.step):
        return (SCALE, SCALER_STEP)
    if own not in _OWN:
        _OWN[own] = (Patch(own, "scale", _around_scale), Patch(own, "step", _around_step))
    return (SCALE, SCALER_STEP, *_OWN[own])


_OWN: dict[type, tuple[Patch, Patch]] = {}
