"""The table of known errors, in Markdown, from what running them has shown."""

from __future__ import annotations

from collections.abc import Iterator

from gpt_guard.records import Severity

from .outcomes import KNOWN, outcome
from .parts import KnownError

HEAD = ("| reported as | what goes wrong | found | at step | named | twin |", "|---|---|---|---|---|---|")


def lines() -> Iterator[str]:
    """The rows, those that nothing finds last, and a line that counts them."""
    yield from HEAD
    for error in sorted(KNOWN, key=lambda error: error.run is None):
        yield row(error)
    found = [error for error in KNOWN if error.run is not None and outcome(error).finding is not None]
    yield ""
    yield f"Found: {len(found)} of {len(KNOWN)}."


def row(error: KnownError) -> str:
    """One row; for an error that nothing finds, why not."""
    if error.run is None:
        return f"| {error.source} | {error.kind} | no: {error.why} | | | |"
    seen = outcome(error)
    if (found := seen.finding) is None:
        return f"| {error.source} | {error.kind} | missed | | | |"
    kind = ", as a note" if found.severity is Severity.INFO else ""
    named = f"`{error.place}`" if seen.named else "no"
    twin = "silent" if seen.silent else "not silent"
    cells = (error.source, error.kind, f"{found.code}, {error.guard}{kind}", _when(error, found.step), named, twin)
    return f"| {' | '.join(cells)} |"


def _when(error: KnownError, step: int | None) -> str:
    if step is None:
        return "before the run"
    return f"{step}" if error.begins in (None, 0) else f"{step}, begins at {error.begins}"
