"""What an exception of torch's most likely means, by what its message says; read once from guides/raised.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from gpt_guard.records import Record


class RaisedError(Record):
    """One kind of error: pieces of its messages, what it most likely is, and what to do."""

    key: str
    texts: tuple[str, ...]
    likely: str
    fix: str


@cache
def raised_errors() -> tuple[RaisedError, ...]:
    """All kinds, in the order in which they are tried."""
    source = resources.files("gpt_guard.catalogue").joinpath("guides", "raised.toml")
    return tuple(RaisedError(**each) for each in tomllib.loads(source.read_text(encoding="utf-8"))["error"])


def meaning_of(message: str) -> RaisedError | None:
    """The kind of error that a message belongs to; None for one that is not known."""
    folded = message.lower()
    return next((each for each in raised_errors() if any(text in folded for text in each.texts)), None)
