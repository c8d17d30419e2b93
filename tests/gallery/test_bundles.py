"""What a bundle tells in a model built anew is what the run has told: the same operation, line and causes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpt_guard.blackbox.replay import replay

from .collection import CASES
from .parts import Case, loop_of, run, told

# In the others nothing ran that could be run again: the batch, the update or a weight was bad.
RUN_AGAIN = [case for case in CASES if case.operation not in ("batch", "update", "buffer", "parameter")]


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize("case", RUN_AGAIN, ids=lambda case: case.name)
def test_the_bundle_tells_the_same(case: Case, tmp_path: Path) -> None:
    finding, _ = run(case, case.runs[0], run_dir=tmp_path)
    assert finding.bundle is not None
    fresh = loop_of(case, case.runs[0])
    torch.manual_seed(99)
    with fresh.training.around():
        done = replay(finding.bundle, fresh.model, loss_fn=fresh.loss_of)
    assert (done.reproduced, done.same) == (True, True), done.verdict
    assert told(done.finding) == told(finding)
