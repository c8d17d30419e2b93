"""What a second forward would take from, add to or wait for: iterators, queues, open files and locks."""

from __future__ import annotations

import io
from typing import Any, Literal

Kind = Literal["iterator", "queue", "file"]
# By the module of the class: none of these need be imported to know that a value is no such thing.
_LOCKS = ("_thread", "threading", "multiprocessing.synchronize")
_QUEUES = ("queue", "_queue", "multiprocessing.queues", "multiprocessing.connection", "torch.multiprocessing.queue")


def may_block(value: Any) -> bool:
    """Whether it is a lock, an event or a barrier: a second forward in the middle of the first would wait for ever."""
    kind = type(value)
    return kind.__module__ in _LOCKS and (hasattr(kind, "acquire") or hasattr(kind, "wait"))


def consumed(value: Any) -> Kind | None:
    """Which of the three a value is; None for what can be read as often as one likes.

    An iterator (a generator, `iter(loader)`, `enumerate(...)`) has no way back, and of a queue or a file nobody knows
    who else reads it.
    """
    kind = type(value)
    if isinstance(value, io.IOBase) or kind.__module__ == "tempfile":
        return "file"
    if kind.__module__ in _QUEUES:
        return "queue"
    return "iterator" if hasattr(kind, "__next__") else None
