"""`gpt-guard explain`: what a finding means, or what is behind a symptom."""

from __future__ import annotations

import difflib
import textwrap
from typing import Annotated

import typer

from gpt_guard import catalogue
from gpt_guard.catalogue.operation_causes import causes
from gpt_guard.catalogue.symptoms import Symptom, match, symptoms
from gpt_guard.cli.terminal import leave
from gpt_guard.records import LikelyCause
from gpt_guard.records.render import LABEL, WIDTH, block


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="A finding's code, such as GG101, or a cause that a replay named; all codes if left out."),
    ] = None,
    symptom: Annotated[
        str | None, typer.Option(help='What you see, in your own words: "loss does not fall", nan, slow ...')
    ] = None,
) -> None:
    """Say what a finding means or what is behind a symptom: causes in order, which test tells them apart, what to do.

    Exit code 0: explained. 2: there is no such code, or no symptom fits these words.
    """
    if code is not None and symptom is not None:
        leave("give a code or --symptom, not both")
    if symptom is not None:
        _explain_symptom(symptom)
        return
    known = catalogue.entries()
    if code is None:
        for each in known.values():
            typer.echo(f"{each.code}  {each.severity:<7}  {each.title}")
        return
    asked = code.strip().upper()
    if (cause := causes().get(asked.lower().replace("-", "_"))) is not None:
        typer.echo(cause_text(cause))
        return
    entry = known.get(asked) or known.get(f"GG{asked}")
    if entry is None:
        leave(f"There is no finding code {code!r}. {_near(asked, list(known))}")
    typer.echo(explanation(entry))


def explanation(entry: catalogue.Entry) -> str:
    """The catalogue's words for one code, laid out as in the finding itself."""
    parts = [
        [f"{entry.code} {entry.title} ({entry.severity})"],
        block("meaning", entry.meaning),
        _causes(entry),
        block("next test", entry.next_test) + block("fix", entry.fix),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _causes(entry: catalogue.Entry) -> list[str]:
    """The causes, each with the test and the fix of its own where it has them."""
    lines: list[str] = []
    for position, cause in enumerate(entry.causes, start=1):
        mark, way = f"{position}. ", entry.ways.get(cause.key)
        texts = [cause.text] if way is None else [cause.text, f"test: {way.next_test}", f"fix: {way.fix}"]
        for number, line in enumerate(line for text in texts for line in _wrapped(text, WIDTH - LABEL - len(mark))):
            head = "causes" if number == 0 and position == 1 else ""
            lines.append(f"{head:<{LABEL}}{' ' * len(mark) if number else mark}{line}")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def cause_text(cause: LikelyCause) -> str:
    """A cause that a replay has named: what it is, the test that tells it from others, the way out."""
    return "\n".join([*block("cause", cause.text), *block("next test", cause.test), *block("fix", cause.fix)])


def symptom_text(symptom: Symptom) -> str:
    """A symptom as plain text: what to try first, then each cause with its test and the commands that run it."""
    parts = [[symptom.title], block("first", symptom.first)]
    for position, cause in enumerate(symptom.causes, start=1):
        lines = block(f"{position:>2}.", cause.text) + block("    test", cause.test)
        # A command is never wrapped: it is there to be copied.
        lines += [f"{'    run' if n == 0 else '':<11}{command}" for n, command in enumerate(cause.run)]
        parts.append(lines + block("    codes", ", ".join(cause.codes)))
    return "\n\n".join("\n".join(part) for part in parts)


def _explain_symptom(text: str) -> None:
    found = match(text)
    if not found:
        listed = "\n".join(f"  {each.key:<20}{each.title}" for each in symptoms().values())
        leave(f"No symptom fits {text!r}. Known are:\n{listed}\nGive one of these, or describe it in other words.")
    if len(found) > 1:
        typer.echo(f"{text!r} fits {len(found)} symptoms.\n")
    typer.echo("\n\n\n".join(map(symptom_text, found)))


def _near(asked: str, known: list[str]) -> str:
    asked = asked if asked.startswith("GG") else f"GG{asked}"
    family = [other for other in known if other[:3] == asked[:3]]
    near = family or difflib.get_close_matches(asked, known, n=6)
    hint = f"Near it: {', '.join(near)}. " if near else ""
    return f"{hint}`gpt-guard explain` lists all codes."
