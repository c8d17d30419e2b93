"""Assertions on data, as they stand in a person's own tests."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpt_guard.catalogue import finding
from gpt_guard.checks.asserts.data import assert_ids_in_range, assert_roundtrip, assert_shifted
from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.errors import GuardUsageError
from gpt_guard.records.render import render_finding

ROWS = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
X, Y = ROWS[:, :-1], ROWS[:, 1:]


def test_what_holds_is_silent() -> None:
    assert_shifted(X, Y)
    assert_shifted(X[0], Y[0])
    assert_shifted(X[0].tolist(), Y[0].tolist())
    assert_shifted(X, X, shift=0)
    assert_shifted(X.int(), torch.where(Y > 9, Y, -1), ignore_index=-1)
    assert_ids_in_range(ROWS, 50)
    assert_ids_in_range(ROWS.numpy().astype(np.uint16), 50)
    assert_roundtrip(sorted(set("a text\n")), "text")


@pytest.mark.parametrize(
    ("x", "y", "code", "said"),
    [
        (X, X.clone(), "GG603", "the shift is 0"),
        (ROWS[:, :-2], ROWS[:, 2:], "GG603", "the shift is 2"),
        (Y, X, "GG603", "the shift is -1"),
        (X, Y.flip(1), "GG603", "no shift fits"),
        (X, Y[:, 1:], "GG600", "[4, 10]"),
        (X.float(), Y, "GG632", "float32"),
        (X, torch.full_like(Y, -100), "GG606", "0 of 44 targets"),
    ],
)
def test_assert_shifted_says_which_shift_it_found(x: torch.Tensor, y: torch.Tensor, code: str, said: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        assert_shifted(x, y)
    assert caught.value.finding.code == code
    assert said in caught.value.finding.seen


def test_labels_for_a_model_that_shifts_inside() -> None:
    with pytest.raises(CheckFailed, match="the shift is 1"):
        assert_shifted(X, Y, shift=0)


def test_rows_too_short_to_tell() -> None:
    with pytest.raises(GuardUsageError, match="too short"):
        assert_shifted([[3]], [[4]], shift=2)
    with pytest.raises(GuardUsageError, match="no token ids"):
        assert_shifted(X[:0], Y[:0])


def test_assert_ids_in_range_names_the_first() -> None:
    ids = ROWS.clone()
    ids[1, 2] = ids[3, 0] = 50
    with pytest.raises(CheckFailed, match="2 of 48 are outside, the first is 50") as caught:
        assert_ids_in_range(ids, 50)
    assert caught.value.finding.evidence["first"] == [1, 2]
    with pytest.raises(CheckFailed, match="-1"):
        assert_ids_in_range([3, -1], 50)
    with pytest.raises(CheckFailed, match="floats"):
        assert_ids_in_range([3.0, 1.0], 50)


def test_assert_roundtrip_shows_where_they_part() -> None:
    class Lowers:
        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text.lower()]

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    assert_roundtrip(Lowers(), "all small")
    with pytest.raises(CheckFailed, match="they part at character 4") as caught:
        assert_roundtrip(Lowers(), "all Small")
    assert "lower case" in caught.value.finding.causes[0]
    assert caught.value.finding.evidence["at"] == 4


def test_a_character_without_an_id_fails_the_assertion() -> None:
    with pytest.raises(CheckFailed, match="KeyError"):
        assert_roundtrip(["a", "b"], "abc")
    with pytest.raises(TypeError, match="tokenizer"):
        assert_roundtrip(3, "abc")


def test_check_failed_is_an_assertion_error_with_the_whole_evidence() -> None:
    found = [finding("GG603", "first"), finding("GG605", "second")]
    error = CheckFailed(found)
    assert isinstance(error, AssertionError)
    assert error.findings == tuple(found)
    assert error.finding is found[0]
    assert str(error) == f"{render_finding(found[0])}\n\n{render_finding(found[1])}"
    again = pickle.loads(pickle.dumps(error))
    assert again.findings == error.findings
    assert str(CheckFailed(found[0])) == render_finding(found[0])
    with pytest.raises(ValueError, match="at least one"):
        CheckFailed([])
