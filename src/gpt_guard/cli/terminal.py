"""What the commands share: how one leaves that cannot go on, and text that this terminal can show."""

from __future__ import annotations

from typing import NoReturn

import typer

from gpt_guard.records.render import clean


def leave(message: str) -> NoReturn:
    """Say on stderr why there is no answer, and end with exit code 2."""
    typer.echo(clean(message), err=True)
    raise typer.Exit(2)


def can_show(text: str, encoding: str | None) -> bool:
    """Whether a stream of this encoding has all characters of a text."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shown(text: str, encoding: str | None) -> str:
    """The text, or its ASCII form where the stream could not show it."""
    return text if can_show(text, encoding) else text.encode("ascii", "backslashreplace").decode()
