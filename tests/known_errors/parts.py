"""How a known silent error is written down, and how it is run: as a small loop, and as its healthy twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from gpt_guard import Guardian
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.records import Finding, Severity

Run = Callable[[bool], Iterable[Finding]]
"""Runs the loop with the error, or (False) its healthy twin, and gives what was found."""


class KnownError(NamedTuple):
    """One error that was reported in public: `source` is where, `kind` says in our words what goes wrong.

    `code` is the finding that must come first, by `guard`, at `step`; `place` is a piece of the module, the parameter,
    the line or the figures that it names. `begins` is the step in which the error begins. Where `run` is None nothing
    finds it, and `why` says why not. `ranks` is True for those that take two processes.
    """

    source: str
    kind: str
    run: Run | None = None
    code: str = ""
    guard: str = ""
    step: int | None = None
    place: str = ""
    begins: int | None = 0
    ranks: bool = False
    why: str = ""


KNOWN: list[KnownError] = []


def known(source: str, kind: str, **expected: Any) -> Callable[[Run], Run]:
    """Note the decorated function as one of the known errors."""

    def note(run: Run) -> Run:
        KNOWN.append(KnownError(source, kind, run, **expected))
        return run

    return note


def not_found(source: str, kind: str, why: str) -> None:
    """Note an error that nothing here finds."""
    KNOWN.append(KnownError(source, kind, why=why))


def watched(
    model: nn.Module, optimizer: Any, loop: Callable[[], None], guards: Iterable[Guard] = (), **options: Any
) -> list[Finding]:
    """What all default guards, and `guards` beside them, find in a loop."""
    with Guardian(model, optimizer, guards=[*default_guards(), *guards], sinks=[], **options) as guardian:
        loop()
    return list(guardian.findings)


def worth_saying(found: Iterable[Finding]) -> list[Finding]:
    """Findings of warning or above."""
    return [each for each in found if each.severity is not Severity.INFO]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)
