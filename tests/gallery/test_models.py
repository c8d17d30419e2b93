"""Faults in attention, normalisation and other layers are told by operation, module, line and cause."""

from __future__ import annotations

import pytest

from . import attention, harder, layers, norms
from .parts import Case, Precision
from .verdict import judge, runs_of


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize(("case", "precision"), runs_of(*attention.CASES, *norms.CASES, *layers.CASES, *harder.CASES))
def test_the_place_and_the_cause(case: Case, precision: Precision) -> None:
    judge(case, precision)
