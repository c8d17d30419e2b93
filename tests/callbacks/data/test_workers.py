from __future__ import annotations

import pytest

from ...cases.data_watch import Case, findings
from ...cases.data_workers import CASES, WORKERS

# The forked process of a test loads a few samples and ends.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=name)
def test_identical_batches_of_workers(case: Case) -> None:
    found = findings(case)
    assert [each.code for each in found] == ([case.code] if case.code else [])
    if case.code:
        assert found[0].evidence["workers"] == WORKERS
        assert found[0].step == 2
        assert found[0].where is not None
        assert "DataLoader(dataset" in found[0].where.text
