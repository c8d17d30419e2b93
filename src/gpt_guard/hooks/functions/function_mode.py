"""A function mode that is opened below what is open already, and is suspended while compiled code runs.

Dynamo traces whatever mode is open into the code that it compiles, cannot trace some calls below one (an error where
`fullgraph=True`), and compiles everything anew once the mode is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch._guards import CompileContext
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from gpt_guard.hooks.patches import Patch


class FunctionMode(TorchFunctionMode):
    """A mode without `with`: `open` and `close` may come in any order with those of other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = False
        self._suspended = False
        self._thread = 0
        self._compiled: Patch | None = None

    def open(self) -> None:
        """Begin to see calls in this thread.

        Goes below the modes that are open already: whoever leaves one of those takes away the top of the stack.
        """
        if self.opened or self._suspended:
            return
        self._thread, self._compiled = get_ident(), _compiled_calls()
        if self._compiled is not None:
            self._compiled.add(self)
        self._enter()

    def close(self) -> None:
        """Stop to see calls, also from below modes that were entered later and are still open."""
        if self._compiled is not None:
            self._compiled.remove(self)
        self._compiled, self._suspended = None, False
        self._leave()

    def suspend(self) -> None:
        """Compiled code is about to run: let it find the modes that it finds without a Guardian."""
        if self.opened and self._thread == get_ident():
            self._leave()
            self._suspended = True

    def resume(self) -> None:
        """What follows runs as it is written."""
        if self._suspended and self._thread == get_ident():
            self._suspended = False
            self._enter()

    def _enter(self) -> None:
        self.opened = True
        modes = open_modes()
        # A default device insists on the lowest place.
        place = 1 if modes and modes[0] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) else 0
        _rearrange([*modes[:place], self, *modes[place:]])

    def _leave(self) -> None:
        if self.opened:
            _rearrange([mode for mode in open_modes() if mode is not self])
            self.opened = False


def open_modes() -> list[TorchFunctionMode]:
    """All open modes of this thread, outermost first."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def _rearrange(modes: Sequence[TorchFunctionMode]) -> None:
    """Have just these modes open, in this order; also where an interrupt comes in the middle of it."""
    try:
        _replace(modes)
    except BaseException:
        _replace(modes)
        raise


def _replace(modes: Sequence[TorchFunctionMode]) -> None:
    while torch._C._len_torch_function_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


_PATCHES: dict[int, Patch] = {}


def _compiled_calls() -> Patch | None:
    """Where a mode hears of compiled code; None as long as nothing in this process can have been compiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not hasattr(frames, "_maybe_set_eval_frame"):
        return None
    return _PATCHES.setdefault(id(frames), Patch(frames, "_maybe_set_eval_frame", _around_compiled))


def _around_compiled(original: Any, modes: tuple[FunctionMode, ...], callback: Any) -> Any:
    # Called with Dynamo switched off, before it is switched on for a call and to put back what was there before. While
    # it compiles, it does the same for parts of its own: they are to find what the compiled code will find.
    if callback is not None:
        for mode in modes:
            mode.suspend()
        return original(callback)
    compiling = CompileContext.current_compile_id() is not None
    result = original(callback)
    if not compiling:
        for mode in modes:
            mode.resume()
    return result
