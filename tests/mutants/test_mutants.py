"""Every planted bug is caught by the stage that should, with the right finding, and by no stage before it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gpt_guard.checks.runner.base import NAMES

from . import (
    bugs_batches,
    bugs_files,
    bugs_generation,
    bugs_learning,
    bugs_models,
    bugs_shapes,
    bugs_tokenizer,
    bugs_training,
)
from .project import healthy, stages_up_to
from .table import MUTANTS, Mutant

SOURCES = (
    bugs_files,
    bugs_tokenizer,
    bugs_batches,
    bugs_shapes,
    bugs_models,
    bugs_learning,
    bugs_training,
    bugs_generation,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.stage}-{mutant.name}")
def test_it_is_caught_by_its_stage_and_by_none_before(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = healthy(tmp_path, trained=mutant.trained)
    project.patch = monkeypatch.setattr
    mutant.change(project)
    report = project.check(only=stages_up_to(mutant.stage))
    failed = [(line.stage, finding.code) for line in report.failed for finding in line.findings]
    assert {stage for stage, _ in failed} == {mutant.stage}, report
    assert mutant.code in {code for _, code in failed}, report


def test_there_are_enough_of_them_and_for_every_stage() -> None:
    count = Counter(mutant.stage for mutant in MUTANTS)
    assert set(count) == set(NAMES)
    assert min(count.values()) >= 3
    assert len(MUTANTS) >= 80
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.change.__module__ in {source.__name__ for source in SOURCES} for mutant in MUTANTS)
