"""The known silent errors: each that is said to be found is, as what and where it is said; its twin is silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed as dist

from .outcomes import KNOWN, outcome
from .parts import KnownError
from .rows import lines

PAGE = Path(__file__).parents[2] / "docs" / "known-errors.md"
FOUND = [error for error in KNOWN if error.run is not None]
NOT = [error for error in KNOWN if error.run is None]

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def test_there_are_eighteen_and_most_are_found() -> None:
    assert len({error.source for error in KNOWN}) == len(KNOWN) == 18
    assert len(FOUND) >= 14
    assert all(error.why for error in NOT)


@pytest.mark.parametrize("error", FOUND, ids=lambda error: error.source)
class TestKnownError:
    def test_it_is_found_and_its_place_named(self, error: KnownError) -> None:
        seen = outcome(error)
        assert seen.finding is not None, [each.code for each in seen.broken]
        assert seen.named, seen.finding
        assert seen.finding.step == error.step
        assert error.guard in (seen.finding.guard, "gpt-guard check")

    def test_it_is_found_within_three_steps_of_its_beginning(self, error: KnownError) -> None:
        if error.step is not None:
            assert error.begins is not None
            assert 0 <= error.step - error.begins <= 2

    def test_its_twin_is_silent(self, error: KnownError) -> None:
        seen = outcome(error)
        assert seen.silent, seen.twin


def test_the_page_says_what_the_code_finds() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [line for line in lines() if line and line not in page] == []
