"""A function mode that is opened below what is open already, and steps aside for compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from gpt_guard.hooks.functions.compiled_calls import compiled_calls
from gpt_guard.hooks.patches import Patch


class OpenedMode(TorchFunctionMode):
    """A mode without `with`: `open` and `close` may come in any order with those of other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = False
        self._aside = False
        self._thread = 0
        self._compiled: Patch | None = None

    def open(self) -> None:
        """Begin to see calls in this thread.

        Goes below the modes that are open already: whoever leaves one of those takes away the top of the stack.
        """
        if self.opened or self._aside:
            return
        self._thread, self._compiled = get_ident(), compiled_calls()
        if self._compiled is not None:
            self._compiled.add(self)
        self._enter()

    def close(self) -> None:
        """Stop to see calls, also from below modes that were entered later and are still open."""
        if self._compiled is not None:
            self._compiled.remove(self)
        self._compiled, self._aside = None, False
        self._leave()

    def step_aside(self) -> None:
        """Compiled code is about to run: let it find the modes that it finds without a Guardian."""
        if self.opened and self._thread == get_ident():
            self._leave()
            self._aside = True

    def come_back(self) -> None:
        """It has ended."""
        if self._aside and self._thread == get_ident():
            self._aside = False
            self._enter()

    def _enter(self) -> None:
        self.opened = True
        modes = _take_all()
        # A default device insists on the lowest place.
        place = 1 if modes and modes[0] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) else 0
        _put_all([*modes[:place], self, *modes[place:]])

    def _leave(self) -> None:
        if self.opened:
            self.opened = False
            _put_all([mode for mode in _take_all() if mode is not self])


def _take_all() -> list[TorchFunctionMode]:
    """All open modes of this thread, outermost first; none is open afterwards."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]


def _put_all(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)
