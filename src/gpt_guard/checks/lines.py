"""What a report looks like as text, line by line: numbered stages, a mark, the measured figure and the expected one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from gpt_guard.checks.stages import heading, title
from gpt_guard.records import CheckResult, Finding
from gpt_guard.render import WIDTH, clean

Kind = Literal["heading", "passed", "failed", "skipped"]
MARKS: dict[str, str] = {"passed": "✓", "failed": "✗", "skipped": "–"}  # noqa: RUF001 - a dash that reads as "none"
PLAIN_MARKS: dict[str, str] = {"passed": "+", "failed": "x", "skipped": "-"}
"""For a terminal whose encoding has no ticks."""
_INDENT = 6


class Line(NamedTuple):
    """One line of text and what it is, for whoever colours it."""

    kind: Kind
    text: str


def report_lines(results: Iterable[CheckResult], marks: dict[str, str] = MARKS) -> Iterator[Line]:
    """The lines of all results, each stage under its heading."""
    stage = None
    for result in results:
        if result.stage != stage:
            stage = result.stage
            yield heading_line(stage)
        yield from result_lines(result, marks)


def heading_line(stage: str) -> Line:
    """Number and title of a stage."""
    return Line("heading", heading(stage))


def result_lines(result: CheckResult, marks: dict[str, str] = MARKS) -> list[Line]:
    """One result, wrapped: mark, title, measured, expected."""
    parts = [result.measured, f"expected {result.expected}" if result.expected else ""]
    said = " | ".join(" ".join(clean(part).split()) for part in parts if part)
    own_title = "" if result.title == title(result.stage) else clean(result.title)
    body = ": ".join(part for part in (own_title, said) if part) or clean(result.title)
    lines = textwrap.wrap(body, WIDTH - _INDENT, break_on_hyphens=False)
    mark = f"   {marks[result.status]} ".ljust(_INDENT)
    return [Line(result.status, f"{' ' * _INDENT if n else mark}{line}") for n, line in enumerate(lines)]


def summary(results: Sequence[CheckResult]) -> str:
    """How many checks passed, failed and were skipped."""
    counts = {status: sum(result.status == status for result in results) for status in MARKS}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing was checked"


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each cause once."""
    return list({finding.cause: finding for finding in reversed(list(findings))}.values())[::-1]
