"""The items of the three checklists, and what an answer to one is made of."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from statistics import median
from typing import Literal, NamedTuple, get_args

from gpt_guard.cli.checklists.run_dir import RunDir
from gpt_guard.records import Finding, Record, Severity

Phase = Literal["before", "during", "after"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Item(Record):
    """One thing to make sure of; `run` is what answers it where a run directory does not."""

    key: str
    ask: str
    run: str
    stage: str | None = None


class ItemAnswer(NamedTuple):
    """`ok` is None for what is not known from here; `seen` is the evidence, or why it is not known."""

    ok: bool | None
    seen: str


@cache
def checklists() -> dict[Phase, tuple[Item, ...]]:
    """The three lists, in order."""
    file = resources.files("gpt_guard.catalogue").joinpath("guides", "checklists.toml")
    lists = tomllib.loads(file.read_text(encoding="utf-8"))
    return {phase: tuple(Item.model_validate(item) for item in lists[phase]) for phase in PHASES}


UNKNOWN = ItemAnswer(None, "")
PART = 10
"""A beginning and an end are a tenth of the steps each."""
ENOUGH = 20
"""Fewer steps have no tenth worth its name."""


def no_finding(
    guard: str, *codes: str, figures: Callable[[RunDir], str] | None = None
) -> Callable[[RunDir], ItemAnswer]:
    """An answer by a guard: no, if it found one of these codes; yes, if it watched the run and found none.

    A code such as "GG2" stands for its family. What is only worth knowing (severity info) does not count. `figures`
    adds them to a yes.
    """

    def answer(run: RunDir) -> ItemAnswer:
        if run.log is None or not run.steps:
            return UNKNOWN
        found = [each for each in above_info(run) if each.code.startswith(codes)]
        if found:
            return ItemAnswer(False, listed(found))
        watching = {name for header in run.log.headers for name in _names(header.get("guards"))}
        if guard not in watching:
            return ItemAnswer(None, f"{guard} was not on")
        known = figures(run) if figures is not None else ""
        return ItemAnswer(True, known or f"{guard} found nothing in {many(len(run.steps), 'step')}")

    return answer


def above_info(run: RunDir) -> list[Finding]:
    """The findings of the run that are more than worth knowing."""
    found = run.log.findings if run.log is not None else ()
    return [finding for finding in found if finding.severity is not Severity.INFO]


def listed(findings: Iterable[Finding]) -> str:
    """Codes with their titles and the first step of each, most severe first."""
    first: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda each: each.severity is not Severity.ERROR):
        first.setdefault(finding.code, finding)
    return "; ".join(f"{each.code} {each.title}{_at(each)}" for each in first.values())


def many(count: int, one: str) -> str:
    """A count with its noun, in the singular where it is one."""
    return f"{count} {one}{'s' if count != 1 else ''}"


def ends(values: Sequence[float]) -> tuple[float, float] | None:
    """The medians of the first and the last tenth; None where there are too few, or none is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < ENOUGH:
        return None
    size = len(finite) // PART
    return median(finite[:size]), median(finite[-size:])


def losses(run: RunDir) -> list[float]:
    """The training losses in order; steps of a second optimizer are left out."""
    return [seen.loss for seen in run.steps if seen.loss is not None and seen.optimizer == 0]


def _at(finding: Finding) -> str:
    return f" (step {finding.step})" if finding.step is not None else ""


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
