"""Samples where a reading is free: figures of one step and of several, kept from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gpt_guard.callbacks.updates.param_columns import Columns, join, unpack
from gpt_guard.callbacks.updates.param_rows import MOST_WAITING, HostRows
from gpt_guard.callbacks.updates.param_sample import Full, Rows

SHAPES = [(6, 5), (3,), (4, 4), ()]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def rows(given: Sequence[Tensor], size: int = 64) -> HostRows:
    return HostRows(list(range(len(given))), given, [each.dim() >= 2 for each in given], size)


@torch.no_grad()
def move(given: Sequence[Tensor], by: float = 0.1) -> None:
    for each in given:
        each.add_(torch.randn(each.shape).to(each.dtype) * by)


def figures(columns: Columns) -> list[float]:
    ends = [columns.moved, columns.held, columns.largest, columns.ratio, columns.least]
    return [*columns.norm, *columns.before, *columns.share, *ends]


def one(sampler: HostRows, *, keep: bool = True) -> Columns:
    sampler.note(later=False)
    (columns,) = sampler.figures(1, keep=keep)
    return columns


def reference(given: Sequence[Tensor], olds: Sequence[Tensor]) -> Columns:
    """By another way: all elements, with the sampler that serves accelerators."""
    full = Full(list(range(len(given))), given, [each.dim() >= 2 for each in given])
    full._copies = [each.clone() for each in olds]
    return unpack(full.change().vector.tolist(), len(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [True, False])
def test_figures_are_those_of_all_elements(dtype: torch.dtype, keep: bool) -> None:
    given = tensors(dtype)
    sampler = rows(given)
    for _ in range(3):
        olds = [each.clone() for each in given]
        sampler.take(known=False)
        move(given)
        found, expected = one(sampler, keep=keep), reference(given, olds)
        assert figures(found) == pytest.approx(figures(expected), rel=1e-3)


def test_shares_count_what_changed() -> None:
    given = [torch.ones(8, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)]
    sampler = rows(given)
    sampler.take(known=False)
    given[0][:2] += 1
    columns = one(sampler)
    assert columns.share == [0.25, 0.0]
    assert columns.least == 0.0


def test_kept_values_serve_as_those_before_the_next_step() -> None:
    given = tensors()
    kept, taken = rows(given), rows(given)
    kept.take(known=False)
    for _ in range(4):
        taken.take(known=False)
        move(given)
        assert figures(one(kept)) == figures(one(taken, keep=False))


def test_steps_that_wait_give_the_figures_of_each() -> None:
    given = tensors()
    late, prompt = rows(given, 4), rows(given, 4)
    late.take(known=False)
    prompt.take(known=False)
    expected: list[Columns] = []
    found: list[Columns] = []
    # The number that waits differs, as full steps and other questions come in between.
    for waiting in (1, MOST_WAITING, 3, 1, 2, MOST_WAITING):
        for _ in range(waiting):
            move(given)
            late.note(later=True)
            expected.append(one(prompt))
        found += late.figures(waiting, keep=True)
        move(given)
        found.append(one(late))
        expected.append(one(prompt))
    for some, other in zip(found, expected, strict=True):
        assert figures(some) == pytest.approx(figures(other), rel=1e-6)


def test_a_write_that_no_counter_shows_is_noticed() -> None:
    given = tensors()
    sampler = rows(given)
    assert sampler.take(known=False)
    move(given)
    one(sampler)
    assert sampler.take(known=True)
    given[0].data.mul_(2.0)
    olds = [each.clone() for each in given]
    assert not sampler.take(known=True)
    move(given)
    assert figures(one(sampler)) == pytest.approx(figures(reference(given, olds)), rel=1e-4)


def test_new_storage_is_looked_at_once_told() -> None:
    given = tensors()
    sampler = rows(given)
    sampler.take(known=False)
    others: list[Tensor | None] = [each.clone() + 1 for each in given]
    assert sampler.rebind(others)
    assert one(sampler).largest == pytest.approx(1.0, rel=1e-5)
    assert not sampler.rebind([torch.zeros(1)] * len(given))
    assert not sampler.rebind([None] * len(given))


def test_a_matrix_that_starts_at_zero_has_no_ratio() -> None:
    given = [torch.zeros(4, 4), torch.ones(4, 4)]
    sampler = rows(given)
    sampler.take(known=False)
    given[0] += 1
    given[1] += 0.5
    columns = one(sampler)
    assert columns.ratio == pytest.approx(0.5)
    assert columns.ratios() == [math.inf, pytest.approx(0.5)]


def test_groups_are_joined_in_the_order_of_their_places() -> None:
    given = tensors()
    wide, half = given[:2], [each.bfloat16() for each in given[2:]]
    parts = []
    for places, members in (([0, 2], wide), ([1, 3], half)):
        sampler = HostRows(places, members, [each.dim() >= 2 for each in members], 64)
        sampler.take(known=False)
        move(members)
        parts.append((places, one(sampler)))
    joined = join(parts)
    assert joined.norm == [parts[0][1].norm[0], parts[1][1].norm[0], parts[0][1].norm[1], parts[1][1].norm[1]]
    assert joined.share[0] == joined.norm[0]
    assert joined.share[1] == parts[1][1].share[0]
    assert joined.held == pytest.approx(math.hypot(parts[0][1].held, parts[1][1].held))
    assert joined.largest == max(parts[0][1].largest, parts[1][1].largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accelerator_gets_the_same_figures(dtype: torch.dtype) -> None:
    given = tensors(dtype)
    device = Rows([0, 1, 2, 3], given, [each.dim() >= 2 for each in given], 64)
    host = rows(given)
    for _ in range(2):
        device.take(known=False)
        host.take(known=False)
        move(given)
        found = unpack(device.change().vector.tolist(), len(given))
        assert figures(one(host)) == pytest.approx(figures(found), rel=1e-5)
