"""Notice `backward()` without touching the loop: the one place that sees the loss, before and after.

`Tensor.backward` looks up `torch.autograd.backward` at each call, so one replaced attribute sees both spellings.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gpt_guard.hooks.patches import Patch


class BackwardListener(Protocol):
    """Who is told about each `backward()` in the process; it finds out itself whether the call concerns it."""

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Before anything is computed; may raise to stop it."""

    def backward_ended(self, losses: tuple[Tensor, ...]) -> None:
        """After gradients are in place; may raise."""

    def backward_failed(self) -> None:
        """The call raised, or a listener did; clean up, do not raise."""


def _around(original: Any, listeners: tuple[BackwardListener, ...], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    try:
        for listener in listeners:
            listener.backward_begins(losses)
        result = original(tensors, *args, **kwargs)
    except BaseException:
        for listener in listeners:
            listener.backward_failed()
        raise
    for listener in listeners:
        listener.backward_ended(losses)
    return result


BACKWARD = Patch(torch.autograd, "backward", _around)
