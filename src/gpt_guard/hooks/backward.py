"""Notice `backward()` without touching the loop: the one place that sees the loss, before and after.

`Tensor.backward` looks up `torch.autograd.backward` at each call, so one replaced attribute sees both spellings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpt_guard.hooks.patches import Patch


class BackwardListener(Protocol):
    """Who is told about each `backward()` in the process; it finds out itself whether the call concerns it."""

    def backward_begins(self, losses: tuple[Tensor, ...]) -> bool:
        """Before anything is computed; may raise to stop it. False if this call cannot concern it."""

    def backward_ended(self) -> None:
        """After gradients are in place; may raise."""

    def backward_failed(self) -> None:
        """The call raised, or a listener did; clean up, do not raise."""


class _BackwardCall(threading.local):
    inside = False
    watcher: Callable[[Any], None] | None = None


_CALL = _BackwardCall()
_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is at work in this thread: what runs now was called by a backward, as a recomputation is."""
    return _task() != -1


@contextmanager
def unnoticed(watcher: Callable[[Any], None] | None = None) -> Iterator[None]:
    """No listener is told of a `backward()` in this thread: gpt_guard runs a step again that has been judged.

    `watcher` is called with what each is called on, before it, and may raise to stop it.
    """
    before = _CALL.inside, _CALL.watcher
    _CALL.inside, _CALL.watcher = True, watcher
    try:
        yield
    finally:
        _CALL.inside, _CALL.watcher = before


def _around(original: Any, listeners: tuple[BackwardListener, ...], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    # Reentrant checkpointing calls backward inside backward, in autograd's own threads on an accelerator: only the
    # outermost call counts.
    if _CALL.inside or _task() != -1:
        if _CALL.watcher is not None and not in_backward():
            _CALL.watcher(tensors)
        return original(tensors, *args, **kwargs)
    _CALL.inside = True
    try:
        if len(listeners) != 1 or type(tensors) is not Tensor:
            return _tell(original, listeners, tensors, *args, **kwargs)
        # As `_tell`, for the usual case, in fewer lines.
        listener, ours = listeners[0], True
        try:
            ours = listener.backward_begins((tensors,))
            result = original(tensors, *args, **kwargs)
            if ours:
                ours = False
                listener.backward_ended()
        except BaseException:
            if ours:
                listener.backward_failed()
            raise
        return result
    finally:
        _CALL.inside = False


def _tell(original: Any, listeners: tuple[BackwardListener, ...], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(tensors, (Tensor, Sequence)):
        tensors = tuple(tensors)
    single = isinstance(tensors, (Tensor, GradientEdge))
    losses = tuple(each for each in ((tensors,) if single else tensors) if isinstance(each, Tensor))
    told: list[BackwardListener] = []
    try:
        for listener in listeners:
            told.append(listener)
            if not listener.backward_begins(losses):
                told.pop()
        result = original(tensors, *args, **kwargs)
    except BaseException:
        for listener in told:
            listener.backward_failed()
        raise
    _tell_all_ended(told)
    return result


def _tell_all_ended(told: list[BackwardListener]) -> None:
    """Each is told, also where one before it halts; the first that raises is heard."""
    while told:
        try:
            told.pop(0).backward_ended()
        except BaseException:
            for listener in told:
                listener.backward_failed()
            raise


BACKWARD = Patch(torch.autograd, "backward", _around)
