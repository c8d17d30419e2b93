"""The norm of each gradient as `clip_grad_norm_` works it out for itself: heard, where it was to be measured anyway.

It takes the norms of all gradients, joins them, and scales the gradients only then. So whoever hears them knows the
gradients as the backward has left them, at no cost but a reference to what it has joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from threading import Lock, get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.utils import clip_grad

from gpt_guard.hooks.patches import Patch

# Who holds it has put something in the place of torch's function, for as long as one call takes.
_HEARING = Lock()
_LISTENING = attrgetter("listening")


class NormListener(Protocol):
    """Who wants to hear the norms; `listening` tells whether now."""

    listening: bool

    def norms_heard(self, gradients: Sequence[Tensor], norms: Tensor | None, total: Tensor | None) -> None:
        """The L2 norms of these, `[n]` in their order, and the norm over all; None where they could not be heard.

        Nothing is scaled yet. `total` is None, too, where torch is about to raise because it is not finite.
        """


def _around_total(
    original: Any, listeners: tuple[NormListener, ...], tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> Any:
    # First: what a compiler sees of a listener, it compiles for anew as often as that changes.
    if is_compiling() or not isinstance(tensors, list) or not (told := [*filter(_LISTENING, listeners)]):
        return original(tensors, norm_type, *args, **kwargs)
    heard: list[Tensor] = []
    failure: RuntimeError | None = None
    total = None
    try:
        total = _hear(heard, original, tensors, norm_type, *args, **kwargs)
    except RuntimeError as error:
        # With `error_if_nonfinite`: the listener knows more of it.
        failure = error
    # The last norm that it takes is that of all the others.
    known = bool(heard) and heard[-1].shape == (len(tensors),) and float(norm_type) == 2.0
    try:
        for listener in told:
            listener.norms_heard(tensors, heard[-1] if known else None, total if known else None)
        if failure is not None:
            raise failure
    finally:
        # It holds this frame, and with it all gradients.
        del failure
    return total


def _hear(heard: list[Tensor], original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it, and keep what it takes norms of in this thread meanwhile; nothing if another thread does the same."""
    if not _HEARING.acquire(blocking=False):
        return original(*args, **kwargs)
    thread, function = get_ident(), torch.linalg.vector_norm

    def hear(values: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            heard.append(values)
        return function(values, *args, **kwargs)

    torch.linalg.vector_norm = hear
    try:
        return original(*args, **kwargs)
    finally:
        torch.linalg.vector_norm = function
        _HEARING.release()


TOTAL_NORMS = (Patch(clip_grad, "_get_total_norm", _around_total),) if hasattr(clip_grad, "_get_total_norm") else ()
"""The patch that tells of the norms, if this torch has a place for it: each from 2.6 on has."""
