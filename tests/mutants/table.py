"""The table of mutants: each breaks one part of a healthy project, and says which stage should see it, as what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .project import Project

Change = Callable[[Project], Any]


@dataclass(frozen=True)
class Mutant:
    """One planted bug; `stage` is the first that must fail, with a finding of `code`."""

    name: str
    stage: str
    code: str
    change: Change
    trained: bool


MUTANTS: list[Mutant] = []


def mutant(stage: str, code: str, *, trained: bool = False) -> Callable[[Change], Change]:
    """Register the decorated function, which breaks the project it is given; its name says how."""

    def register(change: Change) -> Change:
        MUTANTS.append(Mutant(change.__name__, stage, code, change, trained))
        return change

    return register
