"""Notice a GradScaler that the loop uses, whether or not Guardian was told of it.

Its scale must be taken out of losses and gradient norms, and the steps it skips on overflow are healthy: hooks of the
optimizer itself do not fire on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    def scaler_unscales(self, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` was called by the loop itself."""

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


def _around_unscale(
    original: Any, listeners: tuple[ScalerListener, ...], scaler: GradScaler, optimizer: Optimizer
) -> Any:
    # `step()` calls it too, inside: only that of the loop is an event.
    if not _LOCAL.inside and scaler.is_enabled():
        for listener in listeners:
            listener.scaler_unscales(optimizer)
    return original(scaler, optimizer)


SCALE = Patch(GradScaler, "scale", _around_scale)
SCALER_STEP = Patch(GradScaler, "step", _around_step)
UNSCALE = Patch(GradScaler, "unscale_", _around_unscale)


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
    usual = (SCALE, SCALER_STEP, UNSCALE)
    if scaler is None or all(getattr(own, name, None) is getattr(GradScaler, name) for name in _AROUND):
        return usual
    if own not in _OWN:
        _OWN[own] = tuple(Patch(own, name, around) for name, around in _AROUND.items() if hasattr(own, name))
    return (*usual, *_OWN[own])


_AROUND: dict[str, Callable[..., Any]] = {"scale": _around_scale, "step": _around_step, "unscale_": _around_unscale}
_OWN: dict[type, tuple[Patch, ...]] = {}
