"""What a run leaves in its run_dir: the run log `steps.jsonl`, and the report for `gpt-guard compare`.

The log has one JSON object on each line. Lines are of four kinds. `header` comes first and again at each resume; `step`
holds an observation, lr and grad_norm at its front, fields that are not known left out; `finding` holds a finding and
what was done about it; `metrics` holds what the user logged. NaN and the infinities are the strings "NaN", "Infinity"
and "-Infinity".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from gpt_guard.records import RUN_SCHEMA, Action, Finding, Observation, Report
from gpt_guard.report.file import RUN_REPORT_FILE
from gpt_guard.report.run_log import RUN_FILE
from gpt_guard.sinks.base import Sink

_KEPT_GRADS = 2
# What `to_json` below must leave out is what the record itself leaves out of JSON.
_LEFT_OUT = frozenset(name for name, field in Observation.model_fields.items() if field.exclude)
_FRONT = frozenset({"step", "lr", "grad_norm"})


class JsonlSink(Sink):
    """Writes the run log; about 10 microseconds a step, one system call a line.

    A file that is already there is continued: the header stands again where a run was resumed, and a line that a killed
    process left torn keeps a line for itself. Nothing is buffered in this process, so that a kill loses at most the
    line being written, and a forked loader worker has nothing to write a second time.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / RUN_FILE
        self._file: Any = None

    def open(self, header: Mapping[str, Any]) -> None:
        """Create the folder, open the file for appending and write the header line."""
        self._release()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(self.path)
        self._file = self.path.open("ab", buffering=0)
        front = {"kind": "header", "schema": RUN_SCHEMA}
        line = to_json(front | dict(header) | front, inf_nan_mode="strings", fallback=str)
        self._write(b"\n" + line if torn else line)

    def observe(self, observation: Observation) -> None:
        """Write one step line; the two largest and the two smallest gradient norms stand for all of them."""
        fields: dict[str, Any] = {
            "kind": "step",
            "step": observation.step,
            "lr": observation.lr,
            "grad_norm": observation.grad_norm,
        }
        for name, value in observation.__dict__.items():
            if value is not None and value != {} and name not in _FRONT and name not in _LEFT_OUT:
                fields[name] = value
        if observation.grad_norms:
            fields["largest_grads"], fields["smallest_grads"] = _extremes(observation.grad_norms)
        # A dict straight to JSON: 3 times as fast as model_dump_json with `exclude` and the order wanted here.
        self._write(to_json(fields, inf_nan_mode="strings"))

    def find(self, finding: Finding, action: Action) -> None:
        """Write one finding line, with what Guardian did about it."""
        self._write(b'{"kind":"finding","action":"%b",' % action.encode() + finding.model_dump_json().encode()[1:])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one metrics line."""
        self._write(to_json({"kind": "metrics", "step": step, "metrics": metrics}, inf_nan_mode="strings"))

    def close(self, report: Report | None) -> None:
        """Close the file; it can be opened again."""
        self._release()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open: call open(header) first")
        data = line + b"\n"
        # A nearly full disk may take a part of the line only; the next call then raises ENOSPC.
        while data:
            data = data[self._file.write(data) :]

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _extremes(norms: Mapping[str, float | None]) -> tuple[dict[str, float], dict[str, float]]:
    """The largest norms, largest first, and the smallest, smallest first; NaN counts as the largest."""
    known = {name: norm for name, norm in norms.items() if norm is not None}
    # NaN has no order. One sum finds out whether there is any; a key function in C then does for the rest.
    ranks = known if isfinite(sum(known.values())) else {n: v if isfinite(v) else inf for n, v in known.items()}
    names = sorted(ranks, key=ranks.__getitem__)
    largest = {name: known[name] for name in names[: -_KEPT_GRADS - 1 : -1]}
    return largest, {name: known[name] for name in names[:_KEPT_GRADS]}


def _ends_torn(path: Path) -> bool:
    """True where the file's last line has no end: the process that wrote it was killed, or its disk was full."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class ReportSink(Sink):
    """Writes the report on every way out, whole or not at all; the newest run in a folder has it.

    An evaluation alone, with no step, leaves the report of the training that is there already. A folder that cannot be
    written is left to the sink `beside` it to say, where that has.
    """

    def __init__(self, run_dir: str | Path, *, beside: Sink | None = None) -> None:
        self.path = Path(run_dir) / RUN_REPORT_FILE
        self._beside = beside

    def observe(self, observation: Observation) -> None:
        """Nothing: what a report says of a step is counted elsewhere."""

    def find(self, finding: Finding, action: Action) -> None:
        """Nothing: the report has all findings."""

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
