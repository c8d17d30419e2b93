"""What a report looks like as text, line by line: numbered stages, a mark, the measured figure and the expected one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from gpt_guard.checks.runner.stages import heading, title
from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import WIDTH, clean

Kind = Literal["heading", "passed", "failed", "skipped"]
MARKS: dict[str, str] = {"passed": "✓", "failed": "✗", "skipped": "–"}  # noqa: RUF001 - a dash that reads as "none"
PLAIN_MARKS: dict[str, str] = {"passed": "+", "failed": "x", "skipped": "-"}
"""For a terminal whose encoding has no ticks."""
INDENT = 6
"""Columns of the mark."""


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


def result_lines(result: CheckResult, marks: dict[str, str] = MARKS, width: int = WIDTH) -> list[Line]:
    """One result, wrapped: mark, title, measured, expected, and the codes of the findings that speak of it."""
    codes = ", ".join(dict.fromkeys(finding.code for finding in result.findings))
    parts = [result.measured, f"expected {result.expected}" if result.expected else "", f"see {codes}" if codes else ""]
    said = " | ".join(" ".join(clean(part).split()) for part in parts if part)
    own_title = "" if result.title == title(result.stage) else clean(result.title)
    body = ": ".join(part for part in (own_title, said) if part) or clean(result.title)
    lines = textwrap.wrap(body, max(width - INDENT, INDENT), break_on_hyphens=False)
    mark = f"   {marks[result.status]} ".ljust(INDENT)
    return [Line(result.status, f"{' ' * INDENT if n else mark}{line}") for n, line in enumerate(lines)]


def summary(results: Sequence[CheckResult]) -> str:
    """How many checks passed, failed and were skipped, and how many findings passed checks have."""
    counts = {status: sum(result.status == status for result in results) for status in MARKS}
    said = [f"{count} {status}" for status, count in counts.items() if count]
    notes = len(distinct(found for result in results if result.status == "passed" for found in result.findings))
    if notes:
        said.append(f"{notes} note{'s' if notes > 1 else ''}")
    return ", ".join(said) or "nothing was checked"


def told(results: Sequence[CheckResult]) -> list[Finding]:
    """The findings to be told in full, each cause once: first those of what failed, then the notes."""
    ordered = sorted(results, key=lambda result: result.status != "failed")
    return distinct(finding for result in ordered for finding in result.findings)


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each cause once."""
    return list({finding.cause: finding for finding in reversed(list(findings))}.values())[::-1]
