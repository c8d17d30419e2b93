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
    bugs_leaks,
    bugs_learning,
    bugs_losses,
    bugs_models,
    bugs_rows,
    bugs_shapes,
    bugs_surroundings,
    bugs_tokenizer,
    bugs_training,
)
from .outcome import run
from .table import MUTANTS, Mutant

SOURCES = (
    bugs_batches,
    bugs_files,
    bugs_generation,
    bugs_leaks,
    bugs_learning,
    bugs_losses,
    bugs_models,
    bugs_rows,
    bugs_shapes,
    bugs_surroundings,
    bugs_tokenizer,
    bugs_training,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.stage}-{mutant.name}")
def test_it_is_caught_by_its_stage_and_by_none_before(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run(mutant, tmp_path, monkeypatch.setattr)
    if mutant.missed:
        assert not outcome.failed, "it is caught now: take its excuse away"
        return
    assert outcome.right_stage, outcome.told
    assert outcome.right_cause, outcome.told


def test_there_are_enough_of_them_and_for_every_stage() -> None:
    count = Counter(mutant.stage for mutant in MUTANTS)
    assert set(count) == set(NAMES)
    assert min(count.values()) >= 3
    assert len(MUTANTS) >= 80
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.change.__module__ in {source.__name__ for source in SOURCES} for mutant in MUTANTS)
