"""What the loop has put around its step, or checkpointing around a part of it, and that must not see a replay."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from gpt_guard.hooks.capture.saved import Pair, only
from gpt_guard.replaying.stubs import OutOfReach


@contextmanager
def set_aside(saved: Pair | None) -> Iterator[None]:
    """Inside, no dispatch mode and no saved-tensor hooks are on but `saved`, those that were when the forward began.

    A replay often begins in the middle of a forward. Non-reentrant checkpointing counts what its part of the model
    saves, and fails in backward where that was another number; a FLOP counter would count twice. `breakpoint()` does
    nothing: it has stopped once for this step. An optimizer is not stepped, OutOfReach is raised instead. All of it is
    as before afterwards, on every way out.
    """
    stops, steps = sys.breakpointhook, register_optimizer_step_pre_hook(_Refuse())
    sys.breakpointhook = _go_on
    try:
        with _disable_current_modes(), only(saved):
            yield
    finally:
        sys.breakpointhook = stops
        steps.remove()


class _Refuse:
    """Ends the replay of a forward that steps an optimizer by itself: its state would be a step ahead."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            raise OutOfReach(
                f"Not replayed to its end: the forward steps an optimizer itself ({type(optimizer).__name__}), and a "
                f"second step of the same batch would change the run. Leave backward() and step() to the loop."
            )


def _go_on(*_args: Any, **_kwargs: Any) -> None:
    return None
