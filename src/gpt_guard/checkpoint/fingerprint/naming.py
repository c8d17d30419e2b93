"""Names from a file, made safe and short enough to print."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: object, limit: int = 80) -> str:
    """Return a name from a file fit to print: short, and without control characters, which could drive a terminal."""
    cleaned = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: limit + 1])
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 3] + "..."


def some(names: Iterable[object], count: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(printable(name) for name in listed[:count]) + more
