"""PreflightReport: every line of every stage, as text, in colour and as a table, and the findings below them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from gpt_guard.checks.runner.base import heading, title
from gpt_guard.errors import PreflightError
from gpt_guard.records import CheckResult, Finding, Report
from gpt_guard.records.render import WIDTH, clean, render_finding
from gpt_guard.report.file import read_report

if TYPE_CHECKING:
    from rich.text import Text

FACTS = (
    "tokenizer_fingerprint",
    "vocab_size",
    "token_min",
    "token_max",
    "batch_shape",
    "initial_loss",
    "expected_loss",
    "grad_norm",
    "missing_gradients",
    "update_size",
    "overfit_loss",
)
"""The facts that every report has, as None where nothing could be measured."""
_STYLES = {"heading": "bold", "passed": "", "failed": "bold red", "skipped": "dim"}
_COLOURS = {"passed": "#2e7d32", "failed": "#c62828", "skipped": "#777777"}
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
    figures = " | ".join(" ".join(clean(part).split()) for part in parts if part)
    own_title = "" if result.title == title(result.stage) else clean(result.title)
    body = ": ".join(part for part in (own_title, figures) if part) or clean(result.title)
    lines = textwrap.wrap(body, max(width - INDENT, INDENT), break_on_hyphens=False)
    mark = f"   {marks[result.status]} ".ljust(INDENT)
    return [Line(result.status, f"{' ' * INDENT if n else mark}{line}") for n, line in enumerate(lines)]


def summary(results: Sequence[CheckResult]) -> str:
    """How many checks passed, failed and were skipped, and how many findings passed checks have."""
    counts = {status: sum(result.status == status for result in results) for status in MARKS}
    words = [f"{count} {status}" for status, count in counts.items() if count]
    notes = len(distinct(found for result in results if result.status == "passed" for found in result.findings))
    if notes:
        words.append(f"{notes} note{'s' if notes > 1 else ''}")
    return ", ".join(words) or "nothing was checked"


def ordered_findings(results: Sequence[CheckResult]) -> list[Finding]:
    """The findings to be shown in full, each cause once: first those of what failed, then the notes."""
    ordered = sorted(results, key=lambda result: result.status != "failed")
    return distinct(finding for result in ordered for finding in result.findings)


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each cause once."""
    return list({finding.cause: finding for finding in reversed(list(findings))}.values())[::-1]


def styled(line: Line) -> Text:
    """A line in colour: of what passed only the mark, so that what failed stands out."""
    from rich.text import Text

    text = Text(line.text, style=_STYLES[line.kind])
    if line.kind == "passed":
        text.stylize("green", 0, INDENT)
    return text


class PreflightReport(Report):
    """What preflight found. Printing it shows every line; a notebook shows it as a table."""

    @property
    def passed(self) -> bool:
        """True where no check failed. What was skipped has not failed: `checks` says what was not asked, and why."""
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The results that failed, in order."""
        return tuple(result for result in self.checks if result.status == "failed")

    def raise_for_failures(self) -> None:
        """Raise PreflightError, listing the lines that failed and the first finding, if there are any."""
        if self.failed:
            raise PreflightError(self.failed)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises GuardUsageError for anything else."""
        return cls.model_validate(read_report(path).model_dump())

    def __str__(self) -> str:
        lines = [line.text for line in report_lines(self.checks)]
        findings = [f"\n{render_finding(finding)}" for finding in ordered_findings(self.checks)]
        return "\n".join([*lines, "", summary(self.checks), *findings])

    def __rich__(self) -> Text:
        """For `rich.print`: the same text in colour."""
        from rich.text import Text

        text = Text()
        for line in report_lines(self.checks):
            text.append_text(styled(line)).append("\n")
        text.append(f"\n{summary(self.checks)}\n", style="bold")
        for finding in ordered_findings(self.checks):
            text.append(f"\n{render_finding(finding)}\n")
        return text

    def _repr_html_(self) -> str:
        """For a notebook: a table of all lines, the findings below it."""
        rows = []
        stage = ""
        for result in self.checks:
            name = heading(result.stage) if result.stage != stage else ""
            stage = result.stage
            mark = f'<td style="color:{_COLOURS[result.status]}">{MARKS[result.status]}</td>'
            cells = "".join(f"<td>{escape(text)}</td>" for text in (result.title, result.measured, result.expected))
            rows.append(f"<tr><th>{escape(name)}</th>{mark}{cells}</tr>")
        head = "<tr><th>stage</th><th></th><th>check</th><th>measured</th><th>expected</th></tr>"
        findings = "".join(f"<pre>{escape(render_finding(finding))}</pre>" for finding in ordered_findings(self.checks))
        return f"<table>{head}{''.join(rows)}</table><p>{escape(summary(self.checks))}</p>{findings}"
