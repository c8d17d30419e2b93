"""Reading a report back from JSON. The file is untrusted data: bounded in size, validated. Torch is not needed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from gpt_guard.errors import GuardUsageError
from gpt_guard.records import REPORT_SCHEMA, Report
from gpt_guard.records.render import clean

RUN_REPORT_FILE = "run_report.json"
"""In a run_dir; `gpt-guard check --json` writes elsewhere, so that neither takes the other's place."""
MAX_REPORT_BYTES = 64 * 2**20
"""A report has some tens of kilobytes; far above, it is no report."""


def read_report(path: str | PathLike[str]) -> Report:
    """Return the report of a run or of preflight that a JSON file holds, or the one that a run left in its folder.

    Raises GuardUsageError where there is none: no such file, too large, no JSON, another schema, a damaged entry.
    """
    if not isinstance(path, (str, PathLike)):
        raise GuardUsageError(f"read_report({path!r:.60}) cannot work: give the path of a report's JSON file")
    file = Path(path)
    if file.is_dir():
        file = file / RUN_REPORT_FILE
    try:
        if file.stat().st_size > MAX_REPORT_BYTES:
            raise GuardUsageError(f"{file} is larger than {MAX_REPORT_BYTES} bytes: no report")
        raw = file.read_bytes()
    except FileNotFoundError as error:
        raise GuardUsageError(f"there is no report {file}; `gpt-guard check --json {file}` writes one") from error
    except OSError as error:
        raise GuardUsageError(f"cannot read the report {file}: {error.strerror or error}") from error
    if not raw.strip():
        raise GuardUsageError(f"{file} is empty: the run that should write it was killed, or the disk was full")
    try:
        report = Report.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place}: {first['msg']}" if place else str(first["msg"])
        raise GuardUsageError(f"{file} is no report of gpt_guard: {clean(what)[:200]}") from None
    if report.schema_version != REPORT_SCHEMA:
        seen = clean(report.schema_version)[:80]
        raise GuardUsageError(f"{file} has the schema {seen!r}; this gpt_guard reads {REPORT_SCHEMA!r}")
    return report
