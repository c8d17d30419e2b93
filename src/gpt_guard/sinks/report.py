"""ReportSink: the report of a run in `run_dir/run_report.json`, for `gpt-guard compare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt_guard.records import Action, Finding, Observation, Report
from gpt_guard.report.file import RUN_REPORT_FILE
from gpt_guard.sinks.base import Sink
from gpt_guard.sinks.jsonl import JsonlSink


class ReportSink(Sink):
    """Writes the report on every way out, whole or not at all; the newest run in a folder has it.

    An evaluation alone, with no step, leaves the report of the training that is there already. A folder that cannot be
    written is left to the sink `beside` it to say, where that has.
    """

    def __init__(self, run_dir: str | Path, *, beside: Sink | None = None) -> None:
        self.path = Path(run_dir) / RUN_REPORT_FILE
        self._beside = beside

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
        if report is None or not (report.steps or not self.path.exists()):
            return
        try:
            report.save(self.path)
        except OSError:
            # One folder that cannot be written is one warning: the run log in it has said so.
            if self._beside is None or self._beside.trouble is None:
                raise


def with_report(log: JsonlSink) -> list[Sink]:
    """A run log, and the report in the same folder, which is closed last."""
    return [ReportSink(log.path.parent, beside=log), log]
