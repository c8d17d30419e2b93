"""ReportSink: the report of a run in `run_dir/run_report.json`, for `gpt-guard compare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt_guard.records import Action, Finding, Observation, Report
from gpt_guard.report_file import RUN_REPORT_FILE
from gpt_guard.sinks.base import Sink


class ReportSink(Sink):
    """Writes the report on every way out, whole or not at all; the newest run in a folder has it.

    An evaluation alone, with no step, leaves the report of the training that is there already.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / RUN_REPORT_FILE

    def open(self, header: Mapping[str, Any]) -> None:
        """Nothing yet."""

    def observe(self, observation: Observation) -> None:
        """Nothing: what a report says of a step is counted elsewhere."""

    def find(self, finding: Finding, action: Action) -> None:
        """Nothing: the report has all findings."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: the report has the newest metrics."""

    def close(self, report: Report | None) -> None:
        """Write it."""
        if report is not None and (report.steps or not self.path.exists()):
            report.save(self.path)
