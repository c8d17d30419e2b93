"""The gallery itself: wide enough, each case with a line of its own, and shown as a table."""

from __future__ import annotations

import sys

import pytest

from . import table
from .collection import CASES


def test_there_are_more_than_25_causes_in_both_phases_and_all_precisions() -> None:
    assert len({case.cause for case in CASES}) >= 40
    assert {case.phase for case in CASES} == {"forward", "backward", "after step"}
    assert {precision for case in CASES for precision in case.runs} >= {"float32", "bfloat16", "float16", "amp-float16"}
    assert len({case.name for case in CASES}) == len(CASES)


def test_each_line_is_told_apart_from_all_others() -> None:
    assert {case.name: case.places for case in CASES if case.line and len(case.places) != 1} == {}


@pytest.mark.parametrize("style", [[], ["--markdown"]])
def test_the_table_has_a_row_for_each_precision(
    style: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", "--only", "left_padding", "--repeats", "1", *style])
    table.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "left_padding" in line]
    assert len(rows) == 4
    assert all("softmax" in row and "blocks.0.attn" in row and "fully_masked_row" in row for row in rows)
