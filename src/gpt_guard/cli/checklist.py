"""`gpt-guard checklist`: what to make sure of before, during and after training, with answers from a run directory."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from gpt_guard.cli.checklists import PHASES, Item, ItemAnswer, Phase, RunDir, answers, open_run
from gpt_guard.cli.terminal import can_show, leave, shown
from gpt_guard.errors import GuardUsageError
from gpt_guard.records.render import WIDTH, clean

TITLES: dict[Phase, str] = {"before": "Before training", "during": "During training", "after": "After training"}
MARKS = {True: "✓", False: "✗", None: "?"}
PLAIN_MARKS = {True: "+", False: "x", None: "?"}
_INDENT = 6


def checklist(
    phase: Annotated[
        str | None, typer.Argument(help="before, during or after training; all three if left out.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Argument(help="The run_dir of a run: steps.jsonl, report.json, checkpoints are read in it.")
    ] = None,
) -> None:
    """List what to make sure of before, during and after training; with RUN_DIR, each line is answered from it.

    A tick: it is so. A cross: it is not. A question mark: not known from there, and what to run. Exit code 0: no cross.
    1: at least one. 2: the folder is no run directory, or a file in it cannot be used.
    """
    if phase is not None and phase not in PHASES:  # all three, for the folder that stands in its place
        if run_dir is not None or not Path(phase).is_dir():
            known = ", ".join(PHASES)
            leave(
                f"gpt-guard checklist: there is no checklist {phase!r}; there are {known}, and RUN_DIR comes after them"
            )
        run_dir, phase = Path(phase), None
    try:
        run = open_run(run_dir) if run_dir is not None else None
    except GuardUsageError as error:
        leave(f"gpt-guard checklist: {error}")
    marks = MARKS if can_show("".join(MARKS.values()), sys.stdout.encoding) else PLAIN_MARKS
    crosses = 0
    for each in PHASES:
        if phase in (None, each):
            crosses += _show(each, run, marks)
    if run is not None and run.problems:
        leave(f"gpt-guard checklist: {'; '.join(run.problems.values())}")
    if crosses:
        raise typer.Exit(1)


def _show(phase: Phase, run: RunDir | None, marks: dict[bool | None, str]) -> int:
    """Print one list; returns how many lines have a cross."""
    lines = list(answers(phase, run))
    counts = {ok: sum(answer.ok is ok for _, answer in lines) for ok in (True, False, None)}
    tally = f": {counts[True]} yes, {counts[False]} no, {counts[None]} not known from here" if run is not None else ""
    typer.echo(f"{TITLES[phase]}{tally}")
    for item, answer in lines:
        for line in _lines(item, answer, run, marks):
            typer.echo(shown(line, sys.stdout.encoding))
    typer.echo()
    return counts[False]


def _lines(item: Item, answer: ItemAnswer, run: RunDir | None, marks: dict[bool | None, str]) -> list[str]:
    text = f"{item.ask}: {answer.seen}" if answer.seen else item.ask
    wrapped = textwrap.wrap(clean(text), WIDTH - _INDENT, break_on_hyphens=False)
    mark = marks[answer.ok] if run is not None else "-"
    lines = [f"{f'   {mark} ' if n == 0 else '':<{_INDENT}}{line}" for n, line in enumerate(wrapped)]
    if answer.ok is None:
        command = item.run if run is None else item.run.replace("RUN_DIR", str(run.path))
        what = "run" if command.startswith("gpt-guard ") else "do"
        known = "" if run is None else "not known from here; "
        lines.append(f"{'':<{_INDENT}}{known}{what}: {clean(command)}")
    return lines
