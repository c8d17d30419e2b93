"""What Guardian is given: checked, so that a wrong argument teaches, and held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.errors import GuardUsageError

Reads = Literal["auto", "immediate", "per_step"]


def checked_model(model: Any) -> nn.Module:
    """The model, if it is one. Raises GuardUsageError."""
    if not isinstance(model, nn.Module):
        raise GuardUsageError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Write Guardian(model, optimizer), with the "
            f"module whose forward() the loop calls."
        )
    return model


def checked_guards(guards: Sequence[Any]) -> Sequence[Guard]:
    """The guards, each an instance and each once. Raises GuardUsageError."""
    if isinstance(guards, Guard):
        raise GuardUsageError(f"guards is one {guards.name}; it takes a list: guards=[{guards.name}(...)]")
    for place, guard in enumerate(guards):
        if not isinstance(guard, Guard):
            hint = f": write {guard.__name__}()" if isinstance(guard, type) and issubclass(guard, Guard) else ""
            raise GuardUsageError(f"guards holds {guard!r}, which is not a Guard instance{hint}")
        if any(guard is other for other in guards[:place]):
            raise GuardUsageError(f"guards holds the same {guard.name} twice")
    return guards


def checked_reads(reads: Any) -> Reads:
    """The mode of reading, if it is one. Raises GuardUsageError."""
    if reads not in ("auto", "immediate", "per_step"):
        raise GuardUsageError(f'reads is {reads!r}; it can be "auto", "immediate" or "per_step"')
    return reads  # type: ignore[no-any-return]  # checked in the line above


def weak(value: Any) -> Callable[[], Any]:
    """A weak reference where the object allows one; several schedulers come as a list of them."""
    if isinstance(value, (list, tuple)):
        parts = [weak(part) for part in value]
        return lambda: [part() for part in parts]
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
