"""What is remembered of data between two stages of preprocessing: a few facts for each tensor, and no tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.tensors import walk, watchable

FEWEST_ROWS = 3
"""In fewer rows a feature is constant by chance."""


class Described(NamedTuple):
    """What is remembered of a tensor; `whole_sum` is the sum of its elements without what stands behind the point."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    finite: bool
    features: int
    constant: dict[int, float]
    fractions: bool
    whole_sum: float
    rows_equal: bool


def described(data: Any) -> list[Described]:
    """A description of each tensor in a structure. Reads the device."""
    if isinstance(data, list) and all(isinstance(each, Described) for each in data):
        return data
    return [describe_features(tensor) for _, tensor in walk(data) if watchable(tensor) and tensor.numel()]


def describe_features(tensor: Tensor) -> Described:
    """The facts of one tensor that has elements. Reads the device."""
    with torch.no_grad():
        values = tensor.detach()
        table = features_of(values)
        finite = bool(values.isfinite().all())
        floats = values.is_floating_point()
        constant: dict[int, float] = {}
        rows_equal = False
        if values.dim() and table.shape[0] >= FEWEST_ROWS and not values.is_complex():
            same = (table == table[:1]).all(0)
            rows = values.reshape(values.shape[0], -1)
            rows_equal = bool((rows == rows[:1]).all())
            if floats and values.dim() <= 3:
                places = same.nonzero().flatten().tolist()
                constant = {place: float(table[0, place]) for place in places}
        fractions = floats and finite and bool((values != values.round()).any())
        shape, features = tuple(values.shape), table.shape[1]
        # MPS has no float64.
        wide = torch.float32 if values.device.type == "mps" else torch.float64
        whole_sum = 0.0 if values.is_complex() else float(values.to(wide).trunc().sum())
        return Described(shape, values.dtype, finite, features, constant, fractions, whole_sum, rows_equal)


def features_of(values: Tensor) -> Tensor:
    """Samples by features: of a series `[B, T, F]` the last dimension holds the features."""
    if values.dim() <= 1:
        return values.reshape(-1, 1)
    return values.reshape(-1, values.shape[-1]) if values.dim() == 3 else values.reshape(values.shape[0], -1)
