"""Remember who last called `.train()` or `.eval()` on the model, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.patches import Patch
from gpt_guard.records import SourceLine


class ModeLog:
    """The outermost `.train(mode)` calls on one model's modules; `.eval()` is `.train(False)`.

    `last` keeps the newest call on each module, by mode, the newest of all at the end. `changes` grows with every call,
    those on inner modules and gpt_guard's own included: while it stays, no call has set a mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._nested = False
        self.changes = 0
        self.last: dict[bool, dict[str, SourceLine | None]] = {True: {}, False: {}}

    def open(self) -> None:
        """Begin to notice."""
        TRAIN.add(self)

    def close(self) -> None:
        """Stop noticing; may run twice."""
        TRAIN.remove(self)

    def who(self, *, training: bool, of: str | None = None) -> tuple[str, SourceLine | None] | None:
        """Path and line of the last call that set this mode, on the module `of` or one that it is in.

        None if nobody called since entry; of any module where `of` is None.
        """
        for path, line in reversed(self.last[training].items()):
            if of is None or path in ("", of) or of.startswith(f"{path}."):
                return path, line
        return None

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Do not note the calls inside: they are gpt_guard's own."""
        nested, self._nested = self._nested, True
        try:
            yield
        finally:
            self._nested = nested

    def mode_begins(self, module: nn.Module, training: bool) -> bool:
        """Note an outermost call on a module of ours; True if it is one. `.train()` calls itself on each child."""
        if id(module) not in self._paths:
            return False
        self.changes += 1
        if self._nested:
            return False
        self._nested = True
        path, calls = self._paths[id(module)], self.last[bool(training)]
        calls.pop(path, None)
        calls[path] = user_line()
        return True

    def mode_ended(self) -> None:
        """The outermost call is over."""
        self._nested = False


def _around(original: Any, listeners: tuple[ModeLog, ...], module: nn.Module, mode: bool = True) -> Any:
    noted: list[ModeLog] = []
    try:
        # One after the other: a listener that halts must not leave those before it inside of a call.
        for log in listeners:
            if log.mode_begins(module, mode):
                noted.append(log)
        return original(module, mode)
    finally:
        for log in noted:
            log.mode_ended()


TRAIN = Patch(nn.Module, "train", _around)
