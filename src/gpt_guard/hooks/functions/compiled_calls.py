"""Notice when compiled code begins and ends, so that a function mode can step aside for it.

Dynamo traces whatever mode is open into the code that it compiles, cannot trace some calls below one (an error where
`fullgraph=True`), and compiles everything anew once the mode is gone.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from torch._guards import CompileContext

from gpt_guard.hooks.patches import Patch


class Beside(Protocol):
    """Who steps aside, and comes back."""

    def step_aside(self) -> None:
        """What follows in this thread may be compiled."""

    def come_back(self) -> None:
        """What follows runs as it is written."""


def _around(original: Any, listeners: tuple[Beside, ...], callback: Any) -> Any:
    # Called with Dynamo switched off, before it is switched on for a call and to put back what was there before. While
    # it compiles, it does the same for parts of its own: they are to find what the compiled code will find.
    if callback is None and CompileContext.current_compile_id() is not None:
        return original(callback)
    if callback is None:
        result = original(callback)
        for listener in listeners:
            listener.come_back()
        return result
    for listener in listeners:
        listener.step_aside()
    return original(callback)


_PATCHES: dict[int, Patch] = {}


def compiled_calls() -> Patch | None:
    """Where to add a `Beside`; None as long as nothing in this process can have been compiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not hasattr(frames, "_maybe_set_eval_frame"):
        return None
    return _PATCHES.setdefault(id(frames), Patch(frames, "_maybe_set_eval_frame", _around))
