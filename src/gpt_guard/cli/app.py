"""The `gpt-guard` command. Torch and everything that loads it are imported inside the commands that need them.

A command is one function, here or in `commands`, that reads its arguments and prints; what it does stands in the module
that does it.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from gpt_guard.cli.cases import cases
from gpt_guard.cli.check import check
from gpt_guard.cli.checklist import checklist
from gpt_guard.cli.compare import compare
from gpt_guard.cli.explain import explain
from gpt_guard.cli.here import here
from gpt_guard.cli.replay import replay
from gpt_guard.cli.run import run

app = typer.Typer(
    help="Flight instruments for a PyTorch training loop.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)


# The list of commands cuts a longer first sentence.
app.command(short_help="Ten trainings with a silent bug each.")(cases)
app.command(short_help="Check a project before an expensive run.")(check)
app.command(short_help="What to make sure of, by phase.")(checklist)
app.command(short_help="What changed between two reports.")(compare)
app.command(short_help="What a finding or a symptom means.")(explain)
app.command(short_help="Run the step of a crash bundle again.")(replay)
_OWN_OPTIONS_FIRST = {"allow_interspersed_args": False, "ignore_unknown_options": False}
app.command(short_help="Watch a training script as it is.", context_settings=_OWN_OPTIONS_FIRST)(run)


def main() -> None:
    """Entry point of the console script."""
    app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gpt-guard {metadata.version('gpt-guard-torch')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Flight instruments for a PyTorch training loop."""
    if context.invoked_subcommand is None:
        typer.echo(here(Path.cwd()) or context.get_help())
