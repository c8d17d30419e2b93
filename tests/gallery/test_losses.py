"""Faults in losses and measures outside of the model are told by operation, line and cause."""

from __future__ import annotations

import pytest

from . import losses, measures
from .parts import Case, Precision
from .verdict import judge, runs_of


@pytest.mark.parametrize(("case", "precision"), runs_of(*losses.CASES, *measures.CASES))
def test_the_place_and_the_cause(case: Case, precision: Precision) -> None:
    judge(case, precision)
