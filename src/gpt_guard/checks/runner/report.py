"""PreflightReport: every line of every stage, the figures that two runs can be compared by, and the findings."""

from __future__ import annotations

import os
from html import escape
from typing import TYPE_CHECKING, Self

from gpt_guard.checks.runner.lines import INDENT, MARKS, Line, report_lines, summary, told
from gpt_guard.checks.runner.stages import heading
from gpt_guard.errors import PreflightError
from gpt_guard.records import CheckResult, Report
from gpt_guard.records.render import render_finding
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
        findings = [f"\n{render_finding(finding)}" for finding in told(self.checks)]
        return "\n".join([*lines, "", summary(self.checks), *findings])

    def __rich__(self) -> Text:
        """For `rich.print`: the same text in colour."""
        from rich.text import Text

        text = Text()
        for line in report_lines(self.checks):
            text.append_text(styled(line)).append("\n")
        text.append(f"\n{summary(self.checks)}\n", style="bold")
        for finding in told(self.checks):
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
        findings = "".join(f"<pre>{escape(render_finding(finding))}</pre>" for finding in told(self.checks))
        return f"<table>{head}{''.join(rows)}</table><p>{escape(summary(self.checks))}</p>{findings}"
