"""Rows are looked up in the data: how they are drawn, and what the last target is; healthy draws are quiet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_guard.checks.batches.origin import judge_places, last_target, places, same_rows

Batch = tuple[Tensor, Tensor]
T, B = 16, 8
TRAIN = torch.randint(50, (5000,), generator=torch.Generator().manual_seed(0))
VAL = torch.randint(50, (800,), generator=torch.Generator().manual_seed(1))
DATA = {"train": TRAIN, "val": VAL}


def at(starts: Tensor, ids: Tensor = TRAIN) -> Batch:
    rows = ids[starts.reshape(-1, 1) + torch.arange(T + 1)]
    return rows[:, :-1], rows[:, 1:]


def codes(batches: list[Batch], data: dict[str, Tensor] = DATA) -> list[str]:
    found = places(batches, data)
    last = last_target(batches, found, data, -100)
    wrong = list(judge_places(found)) if found is not None else []
    return [each.code for each in (*wrong, *([last] if last is not None else []))]


def drawn(starts: Callable[[int], Tensor], count: int = 8) -> list[Batch]:
    return [at(starts(index)) for index in range(count)]


SHUFFLED = torch.randperm(5000 - T, generator=torch.Generator().manual_seed(2))
HEALTHY: dict[str, list[Batch]] = {
    "drawn evenly": drawn(lambda index: torch.randint(5000 - T, (B,))),
    "blocks in order": drawn(lambda index: T * (B * index + torch.arange(B))),
    "blocks with half of an overlap less one": drawn(lambda index: 9 * (B * index + torch.arange(B))),
    "every window, shuffled": drawn(lambda index: SHUFFLED[B * index : B * index + B]),
    "streams side by side": drawn(lambda index: T * index + 600 * torch.arange(B)),
}


@pytest.mark.parametrize("batches", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_ways_to_draw_are_quiet(batches: list[Batch]) -> None:
    assert codes(batches) == []
    assert same_rows(batches) is None


def test_padded_rows_of_the_text_are_no_foreign_ones() -> None:
    batches = HEALTHY["drawn evenly"]
    padded = []
    for x, y in batches:
        x, y = x.clone(), y.clone()
        x[:, 11:], y[:, 10:] = 0, -100
        padded.append((x, y))
    assert codes(padded) == []


def test_a_text_that_is_hardly_longer_than_a_row_has_no_narrow_part() -> None:
    small = {"train": TRAIN[:60]}
    batches = [at(torch.randint(60 - T, (B,)), TRAIN[:60]) for _ in range(8)]
    assert codes(batches, small) == []


def test_a_small_set_gone_through_again_is_quiet() -> None:
    one, other = at(torch.arange(0, 400, 50)), at(torch.arange(1000, 1400, 50))
    assert same_rows([one, other] * 4) is None


@pytest.mark.parametrize("step", [1, 3, 8])
def test_windows_that_slide(step: int) -> None:
    assert codes(drawn(lambda index: step * (B * index + torch.arange(B)))) == ["GG679"]


@pytest.mark.parametrize("first", [0, 3000])
def test_a_narrow_part(first: int) -> None:
    assert codes(drawn(lambda index: first + torch.randint(200, (B,)))) == ["GG679"]


def test_rows_of_validation() -> None:
    assert codes([at(torch.randint(800 - T, (B,)), VAL) for _ in range(8)]) == ["GG679"]


def test_last_targets_are_compared_with_the_text_and_without_it_with_the_rows() -> None:
    wrong = [(x, x.roll(-1, 1)) for x, _ in HEALTHY["drawn evenly"]]
    assert codes(wrong) == ["GG603"]
    assert codes(wrong, {}) == ["GG603"]
    other = [(x, torch.cat([y[:, :-1], (y[:, -1:] + 7) % 50], 1)) for x, y in HEALTHY["drawn evenly"]]
    assert codes(other) == ["GG603"]
    assert codes(other, {}) == []  # without the text nobody can know


def test_the_same_rows_shuffled() -> None:
    x, y = at(torch.arange(0, 400, 50))
    orders = itertools.repeat(None, 5)
    found = same_rows([(x[order], y[order]) for order in (torch.randperm(B) for _ in orders)])
    assert found is not None
    assert found.code == "GG605"
