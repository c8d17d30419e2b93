"""The casebook: which cases there are, and what came of running one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import NamedTuple

from gpt_guard.catalogue import entry
from gpt_guard.records import Finding, Severity

_PACKAGE = __name__.rpartition(".")[0]
Train = Callable[..., tuple[Finding, ...]]


class Expected(NamedTuple):
    """What a good answer to a case contains.

    `cause` is the key of the root cause in the catalogue; `place` is a piece of text that tells the stage, tensor or
    line, "" where the case asks for none.
    """

    code: str
    cause: str
    place: str = ""


class Case(NamedTuple):
    """One case: a script with `train(broken=...)`, which returns what was found."""

    number: int
    name: str
    title: str
    story: str
    expected: Expected
    train: Train

    @property
    def file(self) -> str:
        """Where the script is, to be read."""
        return inspect.getsourcefile(self.train) or ""


class Outcome(NamedTuple):
    """What was said of the broken script and of its fixed twin, and how long both took (seconds)."""

    case: Case
    broken: tuple[Finding, ...]
    fixed: tuple[Finding, ...]
    seconds: float

    @property
    def finding(self) -> Finding | None:
        """The expected finding, if it was made."""
        return next((each for each in self.broken if each.code == self.case.expected.code), None)

    @property
    def named(self) -> bool:
        """Whether the root cause comes first."""
        found = self.finding
        return found is not None and found.causes[:1] == (self._cause(),)

    def _cause(self) -> str:
        wanted = self.case.expected
        return next(each.text for each in entry(wanted.code).causes if each.key == wanted.cause)

    @property
    def placed(self) -> bool:
        """Whether the finding tells the place; True for a case that asks for none."""
        found = self.finding
        return found is not None and self.case.expected.place in where(found)

    @property
    def others(self) -> tuple[Finding, ...]:
        """What else was said of the broken script, above mere information."""
        return tuple(each for each in self.broken if each is not self.finding and each.severity is not Severity.INFO)

    @property
    def silent(self) -> bool:
        """Whether nothing was said of the fixed twin, mere information apart."""
        return all(each.severity is Severity.INFO for each in self.fixed)

    @property
    def solved(self) -> bool:
        """Found, by its cause, at its place, and no word against the twin."""
        return self.named and self.placed and self.silent


def where(found: Finding) -> str:
    """All that a finding says about a place, as one text."""
    line = str(found.where) if found.where is not None else ""
    return " ".join(filter(None, (line, found.module, found.parameter, found.position, found.seen)))


def cases() -> list[Case]:
    """All cases in order; imports torch."""
    book = import_module(_PACKAGE)
    names = sorted(each.name for each in iter_modules(book.__path__) if each.name.startswith("case_"))
    return [_case(import_module(f"{_PACKAGE}.{name}")) for name in names]


def _case(script: ModuleType) -> Case:
    _, number, name = script.__name__.rpartition(".")[2].split("_", 2)
    title, _, story = (inspect.getdoc(script) or "").partition("\n\n")
    return Case(int(number), name.replace("_", " "), title, " ".join(story.split()), script.EXPECTED, script.train)


def run_case(case: Case) -> Outcome:
    """Train the broken script and its fixed twin, a second or so each; prints nothing and leaves no file."""
    start = time.perf_counter()
    broken, fixed = case.train(broken=True), case.train(broken=False)
    return Outcome(case, broken, fixed, time.perf_counter() - start)
