"""The norm of each gradient as `clip_grad_norm_` works it out for itself: heard, where it was to be measured anyway.

It takes the norms of all gradients, joins them, and scales the gradients only then. So whoever hears them knows the
gradients as the backward has left them, at no cost but a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from gpt_guard.hooks.patches import Patch

# Who holds it has put something in the place of torch's function, for as long as one call takes.
_HEARING = Lock()


class NormListener(Protocol):
    """Who wants to hear the norms; `listening` tells whether now."""

    listening: bool

    def norms_heard(self, gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """The L2 norms of these, in their order; fewer where they could not be heard. Nothing is scaled yet."""


def _around_total(
    original: Any, listeners: tuple[NormListener, ...], tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> Any:
    # First: what a compiler sees of a listener, it compiles for anew as often as that changes.
    if torch.compiler.is_compiling() or not isinstance(tensors, list):
        return original(tensors, norm_type, *args, **kwargs)
    told = [listener for listener in listeners if listener.listening]
    if not told:
        return original(tensors, norm_type, *args, **kwargs)
    heard: list[Tensor] = []
    failure: RuntimeError | None = None
    total = None
    try:
        total = _hear(heard, original, tensors, norm_type, *args, **kwargs)
    except RuntimeError as error:
        # With `error_if_nonfinite`: the listener knows more of it.
        failure = error
    if float(norm_type) != 2.0:
        heard.clear()
    for listener in told:
        listener.norms_heard(tensors, heard)
    if failure is not None:
        raise failure
    return total


def _hear(heard: list[Tensor], original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it, and keep what `torch._foreach_norm` returns in this thread meanwhile; nothing if another thread does."""
    if not _HEARING.acquire(blocking=False):
        return original(*args, **kwargs)
    thread, function = get_ident(), torch._foreach_norm

    def hear(*args: Any, **kwargs: Any) -> Any:
        norms = function(*args, **kwargs)
        if get_ident() == thread:
            heard.extend(norms)
        return norms

    torch._foreach_norm = hear
    try:
        return original(*args, **kwargs)
    finally:
        torch._foreach_norm = function
        _HEARING.release()


TOTAL_NORMS = (Patch(clip_grad, "_get_total_norm", _around_total),) if hasattr(clip_grad, "_get_total_norm") else ()
"""The patch that tells of the norms, if this torch has a place for it: each from 2.6 on has."""
