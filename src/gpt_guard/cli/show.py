"""What `gpt-guard check` shows while it runs: lines on stdout as they are known, a progress bar on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.report import (
    MARKS,
    PLAIN_MARKS,
    Line,
    PreflightReport,
    heading_line,
    ordered_findings,
    result_lines,
    styled,
    summary,
)
from gpt_guard.cli.terminal import can_show, shown
from gpt_guard.records import CheckResult
from gpt_guard.records.render import WIDTH, clean, render_finding

WIDEST = 120
"""Longer lines are hard to read, however wide the terminal is."""


class CheckScreen:
    """Use as a context manager; `result` and `progress` are the runner's callbacks."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        # Elsewhere (a file, a pipe) as in every other text of gpt_guard, whatever window it was started from.
        self._width = min(self._out.width, WIDEST) if self._out.is_terminal else WIDTH
        self._bar = Progress(
            TextColumn("      {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figure]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._marks = MARKS if can_show("".join(MARKS.values()), self._out.encoding) else PLAIN_MARKS
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_progress()

    def about(self, model: str, subject: Subject) -> None:
        """What is checked, and what was not found."""
        if subject.model is None:
            self._print(f"no model: {subject.sources.get('model', model)}")
        else:
            count = sum(parameter.numel() for parameter in subject.model.parameters())
            weights = subject.sources.get("model", "untrained")
            self._print(f"{model}, {count:,} parameters on {subject.device}, {weights}")

    def result(self, result: CheckResult) -> None:
        """Print a line, below the heading of its stage."""
        self._end_progress()
        lines = result_lines(result, self._marks, self._width)
        if result.stage != self._stage:
            self._stage = result.stage
            lines = [heading_line(result.stage), *lines]
        for line in lines:
            self._line(line)

    def progress(self, done: int, total: int, figure: str) -> None:
        """Move the bar; it appears with the first call and goes with the next line."""
        if not self._bar.console.is_terminal:
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total, figure="")
        self._bar.update(self._task, completed=done, total=total, figure=figure)

    def end(self, report: PreflightReport) -> None:
        """The findings, then how many checks passed and how long it took."""
        for finding in ordered_findings(report.checks):
            self._print(f"\n{render_finding(finding, self._width)}")
        style = "bold red" if report.failed else "bold green"
        self._print(f"\n{summary(report.checks)} in {time.monotonic() - self._start:.1f} s", style)

    def _end_progress(self) -> None:
        if self._task is not None:
            self._bar.stop()
            self._bar.remove_task(self._task)
            self._task = None

    def _line(self, line: Line) -> None:
        self._out.print(styled(line._replace(text=self._shown(line.text))))

    def _print(self, text: str, style: str = "") -> None:
        self._out.print(Text(self._shown(text), style=style))

    def _shown(self, text: str) -> str:
        return clean(shown(text, self._out.encoding))
