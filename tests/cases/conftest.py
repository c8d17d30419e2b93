"""What the cases share: a Guardian with every default guard, in both ways of reading, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpt_guard.guardian import Guardian
from gpt_guard.records import Severity

Guarded = Callable[..., Guardian]


@pytest.fixture(params=["immediate", "per_step"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    """Make Guardians with `guarded(model, optimizer, **options)`; fails if one of them has a complaint."""
    made: list[Guardian] = []

    def make(model: Any, optimizer: Any = None, **options: Any) -> Guardian:
        guardian = Guardian(model, optimizer, sinks=[], reads=request.param, **options)
        made.append(guardian)
        return guardian

    yield make
    assert made
    complaints = [
        f"{found.code} ({found.guard}) step {found.step}: {found.seen}"
        for guardian in made
        for found in guardian.findings
        if found.severity is not Severity.INFO
    ]
    assert complaints == []
