"""`gpt-guard compare`: what changed between two reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpt_guard.cli.terminal import leave
from gpt_guard.errors import GuardUsageError
from gpt_guard.report.compare import REL_TOL, change_text, compare_reports
from gpt_guard.report.file import read_report

TITLES = {"setting": "settings", "figure": "figures", "check": "checks", "finding": "findings"}


def compare(
    before: Annotated[Path, typer.Argument(help="The older report, as `gpt-guard check --json` or Report wrote it.")],
    after: Annotated[Path, typer.Argument(help="The newer report.")],
    rel_tol: Annotated[float, typer.Option(min=0.0, help="Relative difference up to which figures are the same.")] = (
        REL_TOL
    ),
) -> None:
    """Say what changed between two reports, of preflight or of runs.

    Exit code 0: nothing differs. 1: something does, as with `diff`. 2: a file cannot be used.
    """
    try:
        reports = read_report(before), read_report(after)
    except GuardUsageError as error:
        leave(f"gpt-guard compare: {error}")
    changes = compare_reports(*reports, rel_tol=rel_tol)
    if not changes:
        typer.echo("no difference")
        return
    for kind, title in TITLES.items():
        lines = [change_text(change) for change in changes if change.kind == kind]
        if lines:
            typer.echo("\n".join([title, *(f"  {line}" for line in lines)]))
    raise typer.Exit(1)
