"""What can be done in a folder, by what lies in it: `gpt-guard` without a command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpt_guard.errors import GuardUsageError
from gpt_guard.report.file import RUN_REPORT_FILE, read_report
from gpt_guard.report.run_log import RUN_FILE

_MOST = 5


def here(folder: Path) -> str:
    """The commands that fit a run folder or a project, each with what it does; empty where nothing is known."""
    lines = list(_lines(folder))
    return "\n".join(lines)


def _lines(folder: Path) -> Iterator[str]:
    log, report = folder / RUN_FILE, folder / RUN_REPORT_FILE
    bundles = sorted(each for each in folder.glob("crash-step-*") if each.is_dir())
    if not (log.is_file() or report.is_file() or bundles):
        return
    yield f"This is the folder of a run{_told(report)}. Here you can:"
    for bundle in bundles[:_MOST]:
        yield _command(f"gpt-guard replay {bundle.name} --model package.module:Class", "run the step that failed again")
    if log.is_file():
        yield _command("gpt-guard checklist during .", "go through what the log shows, point by point")
    if report.is_file():
        yield _command(
            f"gpt-guard compare OTHER/{RUN_REPORT_FILE} {RUN_REPORT_FILE}", "see what changed against another run"
        )
        for code in _codes(report)[:_MOST]:
            yield _command(f"gpt-guard explain {code}", "read what this finding means")
    yield _command("gpt-guard check", "ask preflight about the checkpoint and data in this folder")
    yield "gpt-guard --help lists all commands."


def _command(command: str, what: str) -> str:
    return f"  {command}\n      {what}"


def _told(report: Path) -> str:
    try:
        known = read_report(report)
    except (OSError, GuardUsageError):
        return ""
    return f" of {known.model or 'a model'}, {known.steps} steps"


def _codes(report: Path) -> list[str]:
    try:
        return list(dict.fromkeys(finding.code for finding in read_report(report).findings))
    except (OSError, GuardUsageError):
        return []
