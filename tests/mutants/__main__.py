"""`python -m tests.mutants [WORD ...]`: the table of planted bugs, and how many are caught, where, and as what."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pytest

from . import test_mutants as _registers
from .outcome import Outcome, run
from .table import MUTANTS


def main(words: list[str]) -> int:
    """Print a line for each mutant whose name, stage or module holds one of the words; all without any."""
    assert _registers
    chosen = [
        one
        for one in MUTANTS
        if not words or any(word in f"{one.change.__module__} {one.stage} {one.name}" for word in words)
    ]
    outcomes: list[Outcome] = []
    for mutant in chosen:
        begin = time.perf_counter()
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            outcome = run(mutant, Path(folder), monkeypatch.setattr)
        outcomes.append(outcome)
        print(f"{outcome.words:26} {time.perf_counter() - begin:5.1f} s  {mutant.stage:13} {mutant.name}", flush=True)
        if outcome.words != "caught":
            print(f"{'':36}{outcome.told}")
    total = max(1, len(outcomes))
    caught = sum(bool(one.failed) for one in outcomes)
    stage, cause = sum(one.right_stage for one in outcomes), sum(one.right_cause for one in outcomes)
    print(f"\n{total} mutants: {caught / total:.1%} caught, {stage / total:.1%} by the right stage,", end=" ")
    print(f"{cause / total:.1%} with the right first cause; the healthy twins are tests/mutants/test_healthy.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
