"""What enters a loss is told in the first three steps; the healthy twin is silent."""

from __future__ import annotations

import pytest

from gpt_guard.callbacks.losses.guard import LossInputs
from gpt_guard.records import Finding, Severity

from ...cases.loss_inputs import BUGS, HEALTHY, Case, run

# What is only worth knowing, and still has to be known.
NOTES = ("GG627", "GG655")


def of_losses(case: Case) -> list[Finding]:
    guardian = run(case, guards=[LossInputs()])
    assert not [each for each in guardian.findings if each.code == "GG906"], guardian.findings
    return list(guardian.findings)


@pytest.mark.parametrize("case", BUGS, ids=lambda case: case.name)
def test_bugs_are_named(case: Case) -> None:
    found = of_losses(case)
    assert {each.code for each in found if each.severity is not Severity.INFO or each.code in NOTES} == {case.code}
    named = next(each for each in found if each.code == case.code)
    assert named.causes[0].startswith(case.cause) or case.cause in named.causes[0]
    assert named.step is not None
    assert named.step <= 2
    assert named.guard == "LossInputs"
    if case.module is not None:
        assert named.module == case.module
    if case.line:
        assert named.where is not None
        assert case.line in named.where.text


@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_twins_are_silent(case: Case) -> None:
    assert [each.code for each in of_losses(case) if each.code != case.noted] == []
