"""The table of set-ups, in Markdown, from what running them has shown."""

from __future__ import annotations

from collections.abc import Iterator

from .outcomes import SETUPS, installed, outcome
from .parts import COLUMNS, Setup

HEAD = (f"| set-up | watched by | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|")


def lines() -> Iterator[str]:
    """A row for each set-up that can be tried here."""
    yield from HEAD
    for setup in SETUPS:
        yield row(setup) if installed(setup) else f"| {setup.name} | {setup.how} | {setup.missing} is not installed |"


def row(setup: Setup) -> str:
    """What was seen; a reason stands in place of what is no plain yes."""
    seen = outcome(setup)
    cells = [setup.why.get(column, seen[column]) for column in COLUMNS]
    return f"| {setup.name} | {setup.how} | {' | '.join(cells)} |"
