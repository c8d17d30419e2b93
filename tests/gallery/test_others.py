"""Faults of distances, agents and generators, and of what was wrong before the step, are told with their cause."""

from __future__ import annotations

import pytest

from . import agents, distances, state
from .parts import Case, Precision
from .verdict import judge, runs_of


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize(("case", "precision"), runs_of(*distances.CASES, *agents.CASES, *state.CASES))
def test_the_place_and_the_cause(case: Case, precision: Precision) -> None:
    judge(case, precision)
