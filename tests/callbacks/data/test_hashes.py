from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_guard.callbacks.data.hashes import SameMemory, constant, folded, row_hashes

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*KINDS, torch.complex64], ids=str)
def test_equal_rows_have_equal_hashes_and_others_do_not(dtype: torch.dtype) -> None:
    values = torch.arange(60).view(6, 10) % 7
    values = (values > 3).to(dtype) if dtype is torch.bool else values.to(dtype)
    rows = torch.cat([values, values[2:3]])
    hashes = row_hashes(rows).tolist()
    assert hashes[2] == hashes[-1]
    distinct = len({tuple(str(each) for each in row.tolist()) for row in values})
    assert len(set(hashes[:6])) == distinct


def test_the_place_of_a_value_counts() -> None:
    one, other = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 2, 1]])
    assert row_hashes(one).item() != row_hashes(other).item()
    assert folded(row_hashes(torch.cat([one, other]))) != folded(row_hashes(torch.cat([other, one])))


def test_a_view_has_the_hash_of_its_copy() -> None:
    values = torch.randn(8, 6).T[:, ::2]
    assert torch.equal(row_hashes(values), row_hashes(values.clone()))


def test_random_numbers_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    row_hashes(torch.zeros(3, 777))
    assert torch.equal(before, torch.get_rng_state())


def test_no_collision_among_many_rows_of_few_values() -> None:
    rows = torch.cartesian_prod(*[torch.arange(3)] * 8)
    assert row_hashes(rows).unique().numel() == 3**8


@pytest.mark.parametrize(("values", "expected"), [([2, 2, 2], True), ([2, 2, 3], False)])
def test_constant(values: list[int], expected: bool) -> None:
    assert constant(torch.tensor(values)).item() is expected


def memory_after(change: str) -> tuple[SameMemory, Tensor]:
    tensor = torch.zeros(8)
    known = SameMemory(tensor)
    if change == "written":
        tensor.add_(1)
    elif change == "freed":
        # The allocator may well give the same address again.
        del tensor
        tensor = torch.zeros(8)
    elif change == "another part":
        return known, tensor[:4]
    return known, tensor


@pytest.mark.parametrize(
    ("change", "same"), [("none", True), ("written", False), ("freed", False), ("another part", False)]
)
def test_the_same_memory(change: str, same: bool) -> None:
    known, tensor = memory_after(change)
    assert known.is_of(tensor) is same
