"""The words of the causes: complete, each of them told by some rule, and none told that has no words."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpt_guard.catalogue.operation_causes import causes, hidden_first, likely
from gpt_guard.cli.app import app

LONGEST_TEXT = 260
CODE = "\n".join(
    path.read_text(encoding="utf-8") for path in Path(str(resources.files("gpt_guard.replaying"))).glob("*.py")
)


@pytest.mark.parametrize("key", causes())
def test_words_are_complete(key: str) -> None:
    cause = causes()[key]
    assert re.fullmatch(r"[a-z][a-z0-9_]*", key)
    for text in (cause.text, cause.test, cause.fix):
        assert text == text.strip()
        assert text.endswith(".")
        assert len(text) <= LONGEST_TEXT, text


@pytest.mark.parametrize("key", causes())
def test_each_is_told_by_some_rule(key: str) -> None:
    assert f'"{key}"' in CODE


def test_nothing_is_said_twice() -> None:
    texts = [cause.text for cause in causes().values()]
    assert len(set(texts)) == len(texts)


def test_likely_keeps_the_order_and_drops_repeats() -> None:
    assert [cause.key for cause in likely(["eps_lost", "zero_std", "eps_lost"])] == ["eps_lost", "zero_std"]
    with pytest.raises(KeyError, match="no_such_cause"):
        likely(["no_such_cause"])


def test_of_a_hidden_value_the_selection_comes_first() -> None:
    found = hidden_first(likely(["exp_overflow", "where_unselected"]))
    assert [cause.key for cause in found] == ["where_unselected", "exp_overflow"]
    row = hidden_first(likely(["fully_masked_row", "mask_used"]))
    assert [cause.key for cause in row] == ["fully_masked_row", "where_unselected", "mask_used"]


def test_a_cause_can_be_explained() -> None:
    done = CliRunner().invoke(app, ["explain", "eps-lost"])
    words = " ".join(done.stdout.split())
    assert done.exit_code == 0
    assert all(" ".join(text.split()) in words for text in (causes()["eps_lost"].text, causes()["eps_lost"].fix))
