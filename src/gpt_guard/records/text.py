"""How text is laid out for a terminal: labels beside wrapped lines, figures, one tensor, one line of code."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence

from gpt_guard.records import SourceLine, TensorStats

WIDTH = 100
LABEL = 11


def number(value: float | None) -> str:
    """A figure with four significant digits ("0.8123", "1.2e+05", "nan", "-inf"); "-" for None."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def clean(text: str) -> str:
    """Make control characters visible, line breaks excepted: text from a file must not steer the terminal."""
    visible = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text.expandtabs(4))
    return "".join(visible)


def block(label: str, text: str, width: int = WIDTH) -> list[str]:
    """Lines of `text` wrapped to `width` columns beside `label`; no line at all where `text` is empty."""
    lines = [
        wrapped
        for line in clean(text).strip().split("\n")
        for wrapped in textwrap.wrap(line, width - LABEL, break_on_hyphens=False)
    ]
    return [f"{label if first else '':<{LABEL}}{line}" for first, line in marked(lines)] if lines else []


def numbered(label: str, texts: Iterable[str], width: int = WIDTH) -> list[str]:
    """The texts as an ordered list beside `label`."""
    lines: list[str] = []
    for position, text in enumerate(texts, start=1):
        mark = f"{position}. "
        room = width - LABEL - len(mark)
        for first, line in marked(textwrap.wrap(clean(text), room, break_on_hyphens=False)):
            head = label if first and position == 1 else ""
            lines.append(f"{head:<{LABEL}}{mark if first else ' ' * len(mark)}{line}")
    return lines


def marked(lines: Sequence[str]) -> list[tuple[bool, str]]:
    """Each line, and whether it is the first."""
    return [(position == 0, line) for position, line in enumerate(lines)]


def tensor_text(stats: TensorStats | None) -> str:
    """A tensor in one or two lines: shape, dtype, what of it is not finite, and where."""
    if stats is None:
        return ""
    text = f"{list(stats.shape)} {stats.dtype.removeprefix('torch.')} on {stats.device}"
    if stats.bad:
        counts = {"NaN": stats.nan, "+inf": stats.pos_inf, "-inf": stats.neg_inf}
        text += f": {', '.join(f'{count} {name}' for name, count in counts.items() if count)} of {stats.numel} elements"
    if stats.finite_min is not None and stats.finite_max is not None:
        rest = "the finite rest lies" if stats.bad else "values lie"
        text += f"; {rest} between {number(stats.finite_min)} and {number(stats.finite_max)}"
    elif stats.bad:
        text += "; nothing in it is finite"
    return text + _rows(stats)


def _rows(stats: TensorStats) -> str:
    text = ""
    if stats.bad_rows and stats.shape:
        listed = ", ".join(map(str, stats.bad_rows)) + (", ..." if stats.bad_row_count > len(stats.bad_rows) else "")
        count = max(stats.bad_row_count, len(stats.bad_rows))
        text = f"\nrow{'' if count == 1 else 's'} {listed} of dimension 0 ({count} of {stats.shape[0]})"
    if stats.first_bad:
        text += f"{', ' if text else chr(10)}first at {list(stats.first_bad)}"
    return text


def line_of_code(line: SourceLine | None, width: int = WIDTH) -> list[str]:
    """A line of the user's code: its place, and its text below."""
    if line is None:
        return []
    place = f"{from_here(line.file)}:{line.line} in {line.function}"
    room = width - LABEL
    # A path is shortened at its front and never wrapped: its end, with the line number, is what gets copied.
    place = place if len(place) <= room else f"...{place[3 - room :]}"
    return block("line", f"{place}\n{line.text}", width)


def from_here(file: str) -> str:
    """A file below the current folder by its path from there, as the person would open it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
