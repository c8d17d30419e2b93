"""Where the loss function is not known, no operation is claimed; what was run, and what is missing, is said."""

from __future__ import annotations

import pytest

from .collection import CASES
from .parts import Case, run

OUTSIDE = [case for case in CASES if case.module is None]


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize("case", OUTSIDE, ids=lambda case: case.name)
def test_no_place_is_claimed_in_code_that_is_not_known(case: Case) -> None:
    finding, _ = run(case, case.runs[0], watched=False)
    assert finding.operation is None
    assert finding.replay is not None
    assert not finding.replay.startswith("Reproduced")
    assert "Wrap that code as guardian.watch_loss(function)" in finding.replay
    assert finding.where is not None
    assert finding.where.text == "loss.backward()"
