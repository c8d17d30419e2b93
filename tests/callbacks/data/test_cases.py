from __future__ import annotations

from typing import Any

import pytest

from gpt_guard.records import Severity

from ...cases import data_batches, data_forms
from ...cases.data_watch import CASES, Case, findings

BUGS = [case for case in CASES if case.code is not None]
HEALTHY = [case for case in CASES if case.code is None]


def name(case: Case) -> str:
    return case.name


def test_each_kind_has_two_bugs_and_two_twins() -> None:
    for kind in {case.kind for case in CASES}:
        assert len([case for case in BUGS if case.kind == kind]) >= 2, kind
        assert len([case for case in HEALTHY if case.kind == kind]) >= 2, kind
    assert data_batches.SAME != data_forms.SHAPE


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("case", BUGS, ids=name)
def test_a_bug_is_found(case: Case, reads: Any) -> None:
    found = [each for each in findings(case, reads) if each.severity is not Severity.INFO]
    assert [each.code for each in found] == [case.code]
    assert case.cause in found[0].causes[0]
    assert found[0].guard == "DataWatch"
    if case.line:
        assert found[0].where is not None
        assert case.line in found[0].where.text


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("case", HEALTHY, ids=name)
def test_a_healthy_twin_is_silent(case: Case, reads: Any) -> None:
    found = findings(case, reads)
    assert [each.seen for each in found if each.severity is not Severity.INFO] == []
    assert {each.code for each in found} == set(case.noted)
