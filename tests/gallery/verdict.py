"""Whether what is told of a case is right."""

from __future__ import annotations

from typing import Any

import pytest

from .parts import Case, Precision, run, told


def runs_of(*cases: Case) -> list[Any]:
    """Each case in each precision in which it fails."""
    return [pytest.param(case, precision, id=f"{case.name}-{precision}") for case in cases for precision in case.runs]


def judge(case: Case, precision: Precision) -> None:
    """Operation, phase, module and line are right, and the cause is first or second. Raises AssertionError."""
    finding, _ = run(case, precision)
    found = told(finding)
    assert (found.operation, found.phase, found.module) == (case.operation, case.phase, case.module), found
    if case.line:
        assert found.where is not None, found
        assert (found.where.file, found.where.line) in case.places, found
    assert case.cause in found.causes[:2], found
    if finding.operation is not None:
        assert finding.replay is not None
        assert finding.replay.startswith("Reproduced"), finding.replay
