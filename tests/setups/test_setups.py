"""What Guardian sees in each set-up: nothing is left open, and the page says what running them shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from .outcomes import SETUPS, installed, outcome
from .parts import COLUMNS, Setup
from .rows import row

PAGE = Path(__file__).parents[2] / "docs" / "setups.md"


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
class TestSetup:
    @pytest.fixture(autouse=True)
    def there(self, setup: Setup) -> None:
        if not installed(setup):
            pytest.skip(f"{setup.missing} is not installed here")

    def test_all_holds_that_no_reason_is_given_for(self, setup: Setup) -> None:
        seen = outcome(setup)
        assert {column: seen[column] for column in COLUMNS if column not in setup.why} == dict.fromkeys(
            (column for column in COLUMNS if column not in setup.why), "yes"
        )

    def test_a_reason_is_only_given_where_something_does_not_hold(self, setup: Setup) -> None:
        seen = outcome(setup)
        assert [column for column in setup.why if seen[column] == "yes"] == []

    def test_the_page_shows_it(self, setup: Setup) -> None:
        assert row(setup) in PAGE.read_text(encoding="utf-8")
