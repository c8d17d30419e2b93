"""Attributes of torch that are replaced while at least one Guardian is active, and put back exactly.

One wrapper stands in for the original however many Guardians there are, and asks its listeners in turn. When the last
listener goes, the original returns; if somebody else has replaced the attribute on top of ours meanwhile, theirs stays
and ours only passes through.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.compiler import is_dynamo_compiling

from gpt_guard.hooks.compiled import around, in_one_graph, left_alone, looking

Wrapper = Callable[..., Any]
_LOCK = threading.RLock()


class _Layer(NamedTuple):
    """A wrapper that was put in place, and what was there before."""

    wrapper: Any
    original: Any
    inherited: bool


class Patch:
    """A replaceable attribute; `around(original, listeners, *args, **kwargs)` runs while there are listeners.

    `around` may be entered again from inside `original`: where the attribute calls itself, and where somebody else's
    replacement, put on top of ours earlier, still calls a wrapper of an earlier use.
    """

    def __init__(self, owner: Any, attribute: str, around: Wrapper) -> None:
        self._owner = owner
        self._attribute = attribute
        self._around = around
        self._listeners: tuple[Any, ...] = ()
        self._layers: list[_Layer] = []

    def add(self, listener: Any) -> None:
        """Start to tell a listener; a wrapper is put in place unless one is there."""
        with _LOCK:
            self._listeners = (*self._listeners, listener)
            # Somebody else's attribute may call a wrapper of ours from an earlier use, or may not: a new one is sure.
            if self._top() is None:
                original = getattr(self._owner, self._attribute)
                inherited = self._attribute not in vars(self._owner)
                layer = _Layer(self._wrap(original), original, inherited)
                self._layers.append(layer)
                setattr(self._owner, self._attribute, layer.wrapper)

    def remove(self, listener: Any) -> None:
        """Stop telling a listener; the last one takes away every wrapper that is on top."""
        with _LOCK:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            while not self._listeners and (layer := self._top()) is not None:
                self._layers.remove(layer)
                if layer.inherited:
                    delattr(self._owner, self._attribute)
                else:
                    setattr(self._owner, self._attribute, layer.original)

    def _top(self) -> _Layer | None:
        current = getattr(self._owner, self._attribute)
        return next((layer for layer in self._layers if layer.wrapper is current), None)

    def _wrap(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            listeners = self._listeners
            if not listeners:
                return original(*args, **kwargs)
            if is_dynamo_compiling():
                if in_one_graph():
                    return original(*args, **kwargs)
            elif looking() is not None:
                return around(self._around, original, listeners, *args, **kwargs)
            return self._around(original, listeners, *args, **kwargs)

        left_alone(wrapper)
        return wrapper
