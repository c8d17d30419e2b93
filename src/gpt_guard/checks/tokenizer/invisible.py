"""Characters that nobody sees in an editor: what they are, and which of them are nearly always an accident."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

EXPECTED_BLANKS = frozenset(" \n\t")
_ZERO_WIDTH = frozenset("\u200b\u200c\u200d\u2060\u180e\u00ad")
_JOINERS = frozenset("\u200c\u200d")
"""Arabic, Indic and emoji text needs these two."""


class Invisible(NamedTuple):
    """One such character; `cause` is the key of what it most likely comes from, None where it may well be meant."""

    id: int
    char: str
    name: str
    cause: str | None

    def __str__(self) -> str:
        return f"{self.char!a} {self.name} (id {self.id})"


def invisible(tokens: Iterable[str]) -> list[Invisible]:
    """All tokens of one character that cannot be seen, with their ids, in order."""
    found = []
    for index, token in enumerate(tokens):
        if len(token) == 1 and token not in EXPECTED_BLANKS and (kind := _kind(token)) is not None:
            found.append(Invisible(index, token, *kind))
    return found


def _kind(char: str) -> tuple[str, str | None] | None:
    """Name and cause; None for a character that can be seen."""
    category = unicodedata.category(char)
    known: dict[str, tuple[str, str | None]] = {
        "\r": ("carriage return", "line_ends"),
        "\ufeff": ("byte order mark", "bom"),
        "\ufffd": ("replacement character", "damaged"),
        "\u00a0": ("no-break space", None),
    }
    if char in known:
        return known[char]
    if char in _ZERO_WIDTH:
        return unicodedata.name(char, "zero width").lower(), None if char in _JOINERS else "zero_width"
    if category == "Cf":
        return unicodedata.name(char, "format character").lower(), "zero_width"
    if category in ("Cc", "Cs", "Co", "Cn"):
        # Vertical tab, form feed and the like have no names of their own.
        return {"Cc": "control character", "Cs": "lone surrogate"}.get(category, "unassigned"), "control"
    if category in ("Zs", "Zl", "Zp"):
        return unicodedata.name(char).lower(), None
    if category in ("Mn", "Me"):
        return unicodedata.name(char, "combining mark").lower(), None
    return None
