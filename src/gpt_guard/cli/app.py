"""The `gpt-guard` command. Torch and everything that loads it are imported inside the commands that need them.

A command is one function, here or in `commands`, that reads its arguments and prints; what it does stands in the module
that does it.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from gpt_guard.cli.cases import cases
from gpt_guard.cli.check import check
from gpt_guard.cli.checklist import checklist
from gpt_guard.cli.compare import compare
from gpt_guard.cli.explain import explain
from gpt_guard.cli.replay import replay
from gpt_guard.cli.run import run

app = typer.Typer(
    help="Flight instruments for a PyTorch training loop.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


app.command()(cases)
app.command()(check)
app.command()(checklist)
app.command()(compare)
app.command()(explain)
app.command()(replay)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(run)


def main() -> None:
    """Entry point of the console script."""
    app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gpt-guard {metadata.version('gpt-guard-torch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Flight instruments for a PyTorch training loop."""
