"""The casebook: each case is found, by its cause, at its place, and its fixed twin is left alone."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpt_guard.casebook import Case, CaseResult, cases, run_case
from gpt_guard.catalogue import entry
from gpt_guard.cli.app import app

CASES = cases()
GUIDE = Path(__file__).parents[2] / "docs" / "casebook.md"


@cache
def outcome(number: int) -> CaseResult:
    return run_case(next(case for case in CASES if case.number == number))


def test_the_ten_cases_are_there() -> None:
    assert [case.number for case in CASES] == list(range(1, 11))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestCase:
    def test_the_root_cause_is_named_first(self, case: Case) -> None:
        assert outcome(case.number).named

    def test_the_place_is_told(self, case: Case) -> None:
        assert outcome(case.number).placed

    def test_the_fixed_twin_is_left_alone(self, case: Case) -> None:
        assert outcome(case.number).silent

    def test_a_test_that_tells_the_causes_apart_is_named(self, case: Case) -> None:
        found = outcome(case.number).finding
        assert found is not None
        assert found.next_test == entry(found.code).next_test
        assert found.fix

    def test_what_trains_is_found_in_its_first_steps_or_where_it_begins(self, case: Case) -> None:
        found = outcome(case.number).finding
        assert found is not None
        # Cases 3 and 7 begin with the first validation, 8 and 9 have no steps.
        begins = {3: 8, 7: 10, 8: None, 9: None}.get(case.number, 0)
        assert (found.step is None) if begins is None else (found.step is not None and found.step <= begins + 2)

    def test_the_guide_tells_it(self, case: Case) -> None:
        guide = " ".join(GUIDE.read_text(encoding="utf-8").split())
        assert case.title.rstrip(".") in guide
        assert case.expected.code in guide


def test_the_command_prints_a_case_and_its_twin() -> None:
    result = CliRunner().invoke(app, ["cases", "5"])
    assert result.exit_code == 0
    assert "GG313" in result.output
    assert re.search(r"fixed twin:\s+nothing", result.output)


def test_the_command_lists_the_scripts() -> None:
    result = CliRunner().invoke(app, ["cases", "--list"])
    assert result.exit_code == 0
    for case in CASES:
        assert case.name in result.output
        assert Path(case.file).exists()


def test_a_case_that_is_not_there_is_an_error() -> None:
    result = CliRunner().invoke(app, ["cases", "11"])
    assert result.exit_code == 2
    assert "there are 1 to 10" in result.output


def test_a_case_that_is_not_solved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = CASES[4]._replace(train=lambda broken: ())
    monkeypatch.setattr("gpt_guard.casebook.cases", lambda: [silent])
    result = CliRunner().invoke(app, ["cases"])
    assert result.exit_code == 1
    assert "0 of 1 solved" in result.output
