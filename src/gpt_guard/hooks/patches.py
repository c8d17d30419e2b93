"""Attributes of torch that are replaced while at least one Guardian is active, and put back exactly.

One wrapper stands in for the original however many Guardians there are, and asks its listeners in turn. When the last
listener goes, the original returns; if somebody else has replaced the attribute on top of ours meanwhile, theirs stays
and ours only passes through.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

Wrapper = Callable[..., Any]
_LOCK = threading.RLock()


class Patch:
    """A replaceable attribute; `around(original, listeners, *args, **kwargs)` runs while there are listeners."""

    def __init__(self, owner: Any, attribute: str, around: Wrapper) -> None:
        self._owner = owner
        self._attribute = attribute
        self._around = around
        self._listeners: tuple[Any, ...] = ()
        self._original: Any = None
        self._wrapper: Any = None

    def add(self, listener: Any) -> None:
        """Start to tell a listener; the first one puts the wrapper in place."""
        with _LOCK:
            self._listeners = (*self._listeners, listener)
            # Somebody else's wrapper may still hold ours from an earlier use: that one works again, a second would
            # tell every listener twice.
            if self._wrapper is None:
                self._original = getattr(self._owner, self._attribute)
                self._wrapper = self._wrap(self._original)
                setattr(self._owner, self._attribute, self._wrapper)

    def remove(self, listener: Any) -> None:
        """Stop telling a listener; the last one takes the wrapper away."""
        with _LOCK:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners and getattr(self._owner, self._attribute) is self._wrapper:
                setattr(self._owner, self._attribute, self._original)
                self._original = self._wrapper = None

    def _wrap(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            listeners = self._listeners
            if not listeners:
                return original(*args, **kwargs)
            return self._around(original, listeners, *args, **kwargs)

        return wrapper
