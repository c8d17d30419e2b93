"""`gpt-guard cases`: the casebook, ten trainings with a silent bug each, and what is said of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpt_guard.cli.terminal import leave
from gpt_guard.records.render import block, render_finding

if TYPE_CHECKING:
    from gpt_guard.casebook import Case, CaseResult


def cases(
    number: Annotated[int | None, typer.Argument(help="Run this case only, and print all that is said of it.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the cases and their files; run none.")] = False,
) -> None:
    """Run the casebook: small trainings that look healthy and are not, each beside its fixed twin.

    Exit code 0: every case that was run is solved (found, by its cause, at its place, and the twin is silent). 1: one
    is not. 2: there is no such case.
    """
    from gpt_guard.casebook import cases as all_cases
    from gpt_guard.casebook import run_case

    known = all_cases()
    chosen = [case for case in known if number in (None, case.number)]
    if not chosen:
        leave(f"There is no case {number}; there are {known[0].number} to {known[-1].number}.")
    if only_list:
        typer.echo("\n".join(f"{case.number:>2}  {case.name:<32}{case.title}\n    {case.file}" for case in chosen))
        return
    if number is None:
        typer.echo(f"{'':4}{'case':<32}{'found':<8}{'step':>4}  {'cause':<7}{'place':<7}{'twin':<8}")
    solved = 0
    for case in chosen:
        outcome = run_case(case)
        solved += outcome.solved
        typer.echo(_row(outcome) if number is None else _story(case, outcome))
    if number is None:
        typer.echo(f"\n{solved} of {len(chosen)} solved. `gpt-guard cases N` prints what is said of one.")
    if solved < len(chosen):
        raise typer.Exit(1)


def _row(outcome: CaseResult) -> str:
    case, found = outcome.case, outcome.finding
    place = ("yes" if outcome.placed else "NO") if case.expected.place else "-"
    step = "" if found is None or found.step is None else str(found.step)
    cause, twin = "yes" if outcome.named else "NO", "silent" if outcome.silent else "LOUD"
    code = found.code if found is not None else "NO"
    return f"{case.number:>2}  {case.name:<32}{code:<8}{step:>4}  {cause:<7}{place:<7}{twin:<8}"


def _story(case: Case, outcome: CaseResult) -> str:
    parts = [f"Case {case.number}: {case.title}", "\n".join(block("story", case.story)), f"{'script':<11}{case.file}"]
    parts += ["What is said of it:", *map(render_finding, outcome.broken)]
    twin = [render_finding(each) for each in outcome.fixed]
    return "\n\n".join([*parts, "What is said of its fixed twin:", *(twin or ["nothing"])])
