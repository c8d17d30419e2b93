"""The `gpt-guard` command. Torch and everything that loads it are imported inside the commands that need them.

A command is one function, here or in `commands`, that reads its arguments and prints; what it does stands in the module
that does it.
"""

from __future__ import annotations

import difflib
from importlib import metadata
from typing import Annotated

import typer

from gpt_guard import catalogue
from gpt_guard.commands.check import check
from gpt_guard.commands.compare import compare
from gpt_guard.render import block, numbered

app = typer.Typer(
    help="Flight instruments for a PyTorch training loop.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


app.command()(check)
app.command()(compare)


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


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="A finding's code, such as GG101; all codes if left out.")] = None,
) -> None:
    """Say what a finding means, what causes it, which test tells the causes apart, and how to fix it."""
    known = catalogue.entries()
    if code is None:
        for each in known.values():
            typer.echo(f"{each.code}  {each.severity:<7}  {each.title}")
        return
    asked = code.strip().upper()
    entry = known.get(asked) or known.get(f"GG{asked}")
    if entry is None:
        typer.echo(f"There is no finding code {code!r}. {_near(asked, list(known))}", err=True)
        raise typer.Exit(2)
    typer.echo(explanation(entry))


def explanation(entry: catalogue.Entry) -> str:
    """The catalogue's words for one code, laid out as in the finding itself."""
    parts = [
        [f"{entry.code} {entry.title} ({entry.severity})"],
        block("meaning", entry.meaning),
        numbered("causes", entry.ordered_causes()),
        block("next test", entry.next_test) + block("fix", entry.fix),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _near(asked: str, known: list[str]) -> str:
    asked = asked if asked.startswith("GG") else f"GG{asked}"
    family = [other for other in known if other[:3] == asked[:3]]
    near = family or difflib.get_close_matches(asked, known, n=6)
    hint = f"Near it: {', '.join(near)}. " if near else ""
    return f"{hint}`gpt-guard explain` lists all codes."
