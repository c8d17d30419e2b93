"""Notice the calls between backward and step that leave no hook to register: zero_grad, clipping, scheduler.step.

Patches on classes and on torch's clipping module, in place only in inspected steps. Whatever name a loop has imported a
function by, the call is seen: torch's clipping functions look up their parts in their own module.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gpt_guard.hooks.optimizer import StepsOfAny
from gpt_guard.hooks.patches import Patch
from gpt_guard.hooks.scaler import UNSCALE


class ClipCall(NamedTuple):
    """What a clipping function was called with: parameters, as far as still known, how many, and their gradients."""

    how: str
    parameters: list[Tensor]
    tensors: int
    gradients: list[Tensor]
    limit: float


def _outermost(what: str, leaves_out: Callable[[Any], bool]) -> Callable[..., Any]:
    """Tells of the outermost call of a method: a subclass calls that of its base, a chain steps its parts."""
    running = threading.local()

    def around(
        original: Any, listeners: tuple[LoopCalls | ScheduleCalls, ...], owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if leaves_out(owner) or getattr(running, "inside", False):
            return original(owner, *args, **kwargs)
        running.inside = True
        try:
            for each in listeners:
                each.hear(what, owner)
            return original(owner, *args, **kwargs)
        finally:
            running.inside = False

    return around


def _is_made(scheduler: Any) -> bool:
    """Whether a scheduler is being made, which makes its first step."""
    return bool(getattr(scheduler, "_is_initial", False)) or getattr(scheduler, "_step_count", 1) == 0


_around_zero_grad = _outermost("zeroed", lambda _: is_compiling())
_around_schedule = _outermost("scheduled", _is_made)


def _around_norm(
    original: Any, listeners: tuple[LoopCalls, ...], parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(parameters, max_norm, *args, **kwargs)
    if not is_compiling():
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        gradients = [each.grad for each in given if each.grad is not None]
        call = ClipCall("norm", given, len(given), gradients, _number(max_norm))
        for each in listeners:
            each.hear("clipped", call)
    return result


def _around_grouping(original: Any, listeners: tuple[LoopCalls, ...], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if is_compiling():
        return result
    # Norms group their tensors too: only the frame of clip_grad_value_ is meant. Behind us: Patch's wrapper, the call.
    frame = sys._getframe(2)
    if frame.f_code is _VALUE:
        inside = frame.f_locals
        gradients = inside["grads"]
        # What it was given may be a generator, which is used up by now.
        given = inside["parameters"]
        tensors = len(given) if isinstance(given, (list, tuple)) else len(gradients)
        call = ClipCall("value", [], tensors, list(gradients), _number(inside["clip_value"]))
        for each in listeners:
            each.hear("clipped", call)
    return result


def _number(limit: Any) -> float:
    # A limit that lies on an accelerator is not read; it is some limit.
    if isinstance(limit, Tensor) and limit.device.type != "cpu":
        return 1.0
    return float(limit)


_VALUE = inspect.unwrap(clip_grad.clip_grad_value_).__code__
# Each torch from 2.6 on has them; one that has not shows no clipping, and `sees_clipping` says so.
_PARTS: dict[str, Callable[..., Any]] = {
    "_clip_grads_with_norm_": _around_norm,
    "_group_tensors_by_device_and_dtype": _around_grouping,
}
_CLIPS = tuple(Patch(clip_grad, name, around) for name, around in _PARTS.items() if hasattr(clip_grad, name))
_OWN: dict[tuple[type, str], Patch] = {}


def _patch(owner: type, name: str, around: Callable[..., Any]) -> Patch:
    if (owner, name) not in _OWN:
        _OWN[owner, name] = Patch(owner, name, around)
    return _OWN[owner, name]


def _defining(kind: type, name: str) -> Iterator[type]:
    """The classes in the inheritance of `kind` that define a method by this name."""
    return (each for each in kind.__mro__ if name in vars(each))


def _subclasses(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield each
        yield from _subclasses(each)


def sees_clipping() -> bool:
    """Whether the clipping functions of this torch are made of the parts that are known."""
    return len(_CLIPS) == len(_PARTS)


class LoopCalls:
    """Tells of the calls while it is open: `hear` is given what was called, and its subject.

    "zeroed", "scheduled", "unscaled" and "other_step" come before the call does anything, with the optimizer or module,
    the scheduler, and the optimizer. "clipped" comes after it, with a ClipCall.
    """

    def __init__(self, hear: Callable[[str, Any], None]) -> None:
        self.hear = hear
        self._undo = ExitStack()
        self._steps = StepsOfAny(self._other_step)

    def open(self, optimizers: tuple[Optimizer, ...], scheduler: Any) -> None:
        """Put the patches in place."""
        kinds: list[type] = [nn.Module, *(type(own) for own in optimizers)]
        owners = {owner for kind in kinds for owner in _defining(kind, "zero_grad")}
        patches = [_patch(owner, "zero_grad", _around_zero_grad) for owner in owners]
        schedules = {LRScheduler, *_subclasses(LRScheduler)} | {type(each) for each in _several(scheduler)}
        patches += [_patch(kind, "step", _around_schedule) for kind in schedules if "step" in vars(kind)]
        for patch in (*patches, *_CLIPS, UNSCALE):
            self._undo.callback(patch.remove, self)
            patch.add(self)
        self._steps.open()

    def close(self) -> None:
        """Take them away; may run twice."""
        self._steps.close()
        self._undo.close()

    def scaler_unscales(self, optimizer: Any) -> None:
        """`scaler.unscale_()` tells it so."""
        self.hear("unscaled", optimizer)

    def _other_step(self, optimizer: Optimizer) -> None:
        self.hear("other_step", optimizer)


class ScheduleCalls:
    """Tells of `step()` of every torch scheduler while it is open."""

    def __init__(self, scheduled: Callable[[Any], None]) -> None:
        self._scheduled = scheduled
        self._undo = ExitStack()

    def open(self) -> None:
        """Put the patches in place."""
        self._undo.close()
        for kind in {LRScheduler, *_subclasses(LRScheduler)}:
            if "step" in vars(kind):
                patch = _patch(kind, "step", _around_schedule)
                self._undo.callback(patch.remove, self)
                patch.add(self)

    def close(self) -> None:
        """Take them away; may run twice."""
        self._undo.close()

    def hear(self, _what: str, scheduler: Any) -> None:
        """A scheduler is about to move."""
        self._scheduled(scheduler)


def _several(scheduler: Any) -> tuple[Any, ...]:
    if scheduler is None:
        return ()
    return tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
