"""A GradScaler that the loop uses, whether or not Guardian was told of it: its calls, their order, and the scale.

Its scale must be taken out of losses and gradient norms, and the steps it skips on overflow are healthy: hooks of the
optimizer itself do not fire on them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.ledger import Ledger
from gpt_guard.hooks.patches import Patch
from gpt_guard.hooks.tensors import walk

GradScaler = torch.amp.GradScaler
State = list[tuple[int, int]]
"""Identity and version of each gradient."""


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


class _ScalerCall(threading.local):
    inside = False


_CALL = _ScalerCall()


def _around_scale(original: Any, listeners: tuple[ScalerListener, ...], scaler: GradScaler, outputs: Any) -> Any:
    if _CALL.inside or not scaler.is_enabled():
        return original(scaler, outputs)
    # A subclass may call the method of its base, and a listener may scale a number of its own: one call is one event.
    _CALL.inside = True
    try:
        scaled = original(scaler, outputs)
        for listener in listeners:
            listener.loss_scaled(scaler, outputs, scaled)
    finally:
        _CALL.inside = False
    return scaled


def _around_step(
    original: Any,
    listeners: tuple[ScalerListener, ...],
    scaler: GradScaler,
    optimizer: Optimizer,
    *args: Any,
    **kw: Any,
) -> Any:
    if _CALL.inside or not scaler.is_enabled():
        return original(scaler, optimizer, *args, **kw)
    _CALL.inside = True
    try:
        for listener in listeners:
            listener.scaler_steps(optimizer)
        result = original(scaler, optimizer, *args, **kw)
        for listener in listeners:
            listener.scaler_stepped(optimizer)
    finally:
        _CALL.inside = False
    return result


def _around_unscale(
    original: Any, listeners: tuple[ScalerListener, ...], scaler: GradScaler, optimizer: Optimizer
) -> Any:
    # `step()` calls it too, inside: only that of the loop is an event.
    if not _CALL.inside and scaler.is_enabled():
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


class Misuse(IntEnum):
    """What the order of calls makes possible; the norms at the step decide whether it is so."""

    CLIPPED_SCALED = 1
    PLAIN_STEP = 2
    UNSCALED_LOSS = 3
    BOTH_STEPS = 4


class ScalerUse:
    """Follows the calls from the first backward of a step to the step of each optimizer; reads no values.

    Says nothing where it is not sure: where some losses of one step were scaled and others were not, or where nobody
    scales at all. `seen` is False until a scaler has scaled something: until then nothing is to be told to it.
    """

    def __init__(self) -> None:
        self.seen = False
        self.scale: Tensor | None = None
        self._carried: Tensor | None = None
        self._sure = True
        self._new = True
        self._after_backward: State = []
        self._unscaled: set[int] = set()
        self._applied: dict[int, State] = {}
        self._inside: int | None = None
        self._touched = False

    def scaled(self, scale: Tensor | None) -> None:
        """A loss was scaled by this."""
        self.seen = True
        self.scale = scale if scale is not None else self.scale

    def backward_ended(self, unit: Tensor | None, *, fresh: bool, state: State) -> None:
        """A backward of ours left gradients that carry `unit`; `fresh` if a loss was scaled just for it."""
        if unit is None and not self.seen:
            # Nobody has scaled anything so far: only that this step has had an unscaled backward is worth noting.
            self._new, self._after_backward = False, state
            return
        if self._new:
            self._new, self._sure, self._carried = False, True, unit
            self._unscaled.clear()
            self._applied.clear()
        elif (self._carried is None) != (unit is None) or self._unscaled:
            self._sure = False
        # A scale that is only kept from an earlier backward may not be that of this loss.
        self._sure = self._sure and fresh == (unit is not None)
        self._after_backward = state

    def unscales(self, index: int) -> None:
        """The loop calls `scaler.unscale_()` for an optimizer of ours."""
        self._unscaled.add(index)

    def scaler_steps(self, index: int, state: State) -> None:
        """`scaler.step()` begins for an optimizer of ours, with its gradients still as the loop has left them."""
        self._inside = index
        self._touched = state != self._after_backward

    def scaler_stepped(self) -> None:
        """`scaler.step()` returned."""
        self._inside = None

    def at_step(self, index: int, state: State) -> Misuse | None:
        """What may be wrong with the step that begins; None for every healthy order of calls."""
        if not self._sure:
            return None
        if self._inside == index:
            if self._carried is None:
                return None if self._new else Misuse.UNSCALED_LOSS
            return Misuse.CLIPPED_SCALED if self._touched and index not in self._unscaled else None
        if index in self._applied:
            return Misuse.BOTH_STEPS if self._applied[index] == state else None
        return Misuse.PLAIN_STEP if self._carried is not None and index not in self._unscaled else None

    def put(self, ledger: Ledger, index: int, state: State) -> None:
        """Leave what may be wrong, and the scale, for whoever judges the step."""
        if self.scale is not None and (misuse := self.at_step(index, state)) is not None:
            ledger.put("scaler.case", misuse.value)
            ledger.put("scaler.scale", self.scale)

    def step_ended(self, index: int, state: State) -> None:
        """The optimizer has made its step: the next backward begins another one."""
        self._new = True
        if self._inside == index:
            self._applied[index] = state


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
