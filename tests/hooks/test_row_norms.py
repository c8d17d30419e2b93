"""Norms of gradients with those of one small shape joined, against norms of each by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gpt_guard.hooks.row_norms import RowNorms

SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "a model's": [(8, 8), (8,), (8,), (24, 8), (24,), (8,), (8,), (8, 8), (8,), (96, 8)],
    "small matrices": [(3, 4), (3, 4), (5,), (3, 4), (3, 4), (7, 7)],
    "all alike": [(6,)] * 5,
    "none alike": [(1,), (2,), (3,), (4,), (5,)],
    "large ones": [(2048,)] * 6,
    "one": [(3, 3)],
    "scalars": [(), (), (), (), ()],
    "empty among them": [(0,), (0,), (0,), (0,), (2,)],
}


def gradients(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_norm_stands_in_its_place(name: str, dtype: torch.dtype) -> None:
    values = [value.to(dtype) for value in gradients(SHAPES[name])]
    found = RowNorms(values).measure(values)
    assert found == pytest.approx([float(value.norm()) for value in values], rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(10))
def test_what_is_not_finite_stays_so_in_its_place(bad: float, place: int) -> None:
    values = gradients(SHAPES["a model's"])
    values[place].view(-1)[-1] = bad
    found = RowNorms(values).measure(values)
    assert [not abs(norm) < torch.inf for norm in found] == [other == place for other in range(10)]


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_is_missing_or_of_another_shape_raises(place: int) -> None:
    values = gradients(SHAPES["a model's"])
    norms = RowNorms(values)
    given: list[Tensor | None] = [*values]
    given[place] = None
    with pytest.raises((TypeError, RuntimeError)):
        norms.measure(given)  # type: ignore[arg-type]  # what is asked here
    with pytest.raises(RuntimeError):
        norms.measure([*values[:1], torch.ones(5), *values[2:]])


def test_no_graph_is_built_and_grad_mode_stays() -> None:
    values = [value.requires_grad_() for value in gradients(SHAPES["a model's"])]
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            RowNorms(values).measure(values)
            assert torch.is_grad_enabled() is enabled
