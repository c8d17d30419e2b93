"""What several answers are made of: whether a guard that was there has spoken, and figures over a part of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from gpt_guard.cli.checklists.lists import Answer
from gpt_guard.cli.checklists.run_dir import RunDir
from gpt_guard.records import Finding, Severity

UNKNOWN = Answer(None, "")
PART = 10
"""A beginning and an end are a tenth of the steps each."""
ENOUGH = 20
"""Fewer steps have no tenth worth its name."""


def quiet(guard: str, *codes: str, say: Callable[[RunDir], str] | None = None) -> Callable[[RunDir], Answer]:
    """An answer by a guard: no, if it found one of these codes; yes, if it watched the run and found none.

    A code such as "GG2" stands for its family. What is only worth knowing (severity info) does not count. `say` adds
    the figures.
    """

    def answer(run: RunDir) -> Answer:
        if run.log is None or not run.steps:
            return UNKNOWN
        found = [each for each in spoken(run) if each.code.startswith(codes)]
        if found:
            return Answer(False, listed(found))
        watching = {name for header in run.log.headers for name in _names(header.get("guards"))}
        if guard not in watching:
            return Answer(None, f"{guard} was not on")
        figures = say(run) if say is not None else ""
        return Answer(True, figures or f"{guard} found nothing in {many(len(run.steps), 'step')}")

    return answer


def spoken(run: RunDir) -> list[Finding]:
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
