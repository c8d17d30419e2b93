"""`gpt-guard compare`: what changed between two reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpt_guard.cli.terminal import leave
from gpt_guard.errors import GuardUsageError
from gpt_guard.report.compare import REL_TOL, change_text, compare_reports, partings
from gpt_guard.report.file import read_report
from gpt_guard.report.run_log import RUN_FILE, read_run

TITLES = {
    "setting": "settings",
    "curve": "where the runs part",
    "figure": "figures",
    "check": "checks",
    "finding": "findings",
}


def compare(
    before: Annotated[Path, typer.Argument(help="The older run's folder, or a report that --json or Report wrote.")],
    after: Annotated[Path, typer.Argument(help="The newer one.")],
    rel_tol: Annotated[float, typer.Option(min=0.0, help="Relative difference up to which figures are the same.")] = (
        REL_TOL
    ),
) -> None:
    """Say what changed between two runs or two reports, of preflight or of runs.

    Of two folders it also says where the runs part: the first step at which lr, loss or gradient norm differ. Exit code
    0: nothing differs. 1: something does, as with `diff`. 2: a file cannot be used.
    """
    try:
        changes = compare_reports(read_report(before), read_report(after), rel_tol=rel_tol)
        if all((each / RUN_FILE).is_file() for each in (before, after)):
            changes = (*changes, *partings(read_run(before), read_run(after), rel_tol))
    except GuardUsageError as error:
        leave(f"gpt-guard compare: {error}")
    if not changes:
        typer.echo("no difference")
        return
    for kind, title in TITLES.items():
        lines = [change_text(change) for change in changes if change.kind == kind]
        if lines:
            typer.echo("\n".join([title, *(f"  {line}" for line in lines)]))
    settings = sum(change.kind == "setting" for change in changes)
    if settings > 1 and settings < len(changes):
        typer.echo(f"{settings} settings differ: what came of which, only runs with one change each can tell.")
    raise typer.Exit(1)
