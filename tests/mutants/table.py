"""The table of mutants: each breaks one part of a healthy project, and says which stage should see it, as what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .project import Project

Change = Callable[[Project], Any]


@dataclass(frozen=True)
class Mutant:
    """One planted bug; `stage` is the first that must fail, with a finding of `code` whose first cause is `cause`.

    `missed` says why none can be asked of this one: it is in the table to be seen, and must not be caught by accident.
    """

    name: str
    stage: str
    code: str
    change: Change
    trained: bool
    cause: str | None = None
    missed: str = ""


MUTANTS: list[Mutant] = []


def mutant(
    stage: str, code: str, cause: str | None = None, *, trained: bool = False, missed: str = ""
) -> Callable[[Change], Change]:
    """Register the decorated function, which breaks the project it is given; its name says how."""

    def register(change: Change) -> Change:
        MUTANTS.append(Mutant(change.__name__, stage, code, change, trained, cause, missed))
        return change

    return register
