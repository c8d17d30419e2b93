"""Patterns that match no module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase


def idle_patterns(patterns: Iterable[str], paths: Sequence[str]) -> list[str]:
    """What to say of each pattern that matches none of the paths: a slip of the pen, or meant for another model."""
    said: list[str] = []
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = ", ".join(get_close_matches(pattern.rstrip("*").rstrip("."), paths, n=3))
            hint = f"; near it: {near}" if near else ""
            said.append(f"nothing is ignored by {pattern!r}: it matches no module{hint}")
    return said
