"""Hooks on the watched model itself: its call begins, and returns."""

from __future__ import annotations

from typing import Any, Protocol

from torch._C import _is_tracing

from gpt_guard.hooks.hook import EntryHook, ReturnHook, Tap, compiler


class RootTap(Tap, Protocol):
    """A tap that is told of the model's own calls."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model was called."""

    def end(self, output: Any) -> None:
        """The model returned."""


class RootBegins(EntryHook):
    """Tells the tap that the model was called."""

    __slots__ = ()
    tap: RootTap

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell it."""
        # `listens` written out, here and below.
        tap = self.tap
        if not (tap.paused or compiler._is_compiling_flag or _is_tracing()):
            tap.begin(args, kwargs)


class RootEnded(ReturnHook):
    """Tells the tap that the model has returned."""

    __slots__ = ()
    tap: RootTap

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """Tell it."""
        tap = self.tap
        if not (tap.paused or compiler._is_compiling_flag or _is_tracing()):
            tap.end(output)
