"""What counts as the same answer: how far two tensors are apart, and how far rounding alone may take them."""

from __future__ import annotations

import torch
from torch import Tensor

SAME_SHAPE = 64.0
"""Roundings allowed between two forwards of one shape. torch promises no bit-equality (its notes on numerical
accuracy); a leak through an untrained attention layer of width 1000 is a thousand times as large in float32."""


def difference(one: Tensor, other: Tensor) -> Tensor:
    """`|one - other|` elementwise, where equal infinities and NaN in both count as equal, NaN in one as infinite."""
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        one, other = one.double(), other.double()
    apart = (one - other).abs()
    apart = apart.masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
    return apart.nan_to_num(nan=float("inf"), posinf=float("inf"))


def rounding(values: Tensor, roundings: float = SAME_SHAPE) -> float:
    """How far values of this dtype and size may be apart by rounding alone; reads the device."""
    if not values.is_floating_point() or not values.numel():
        return 0.0
    finite = values.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(roundings * torch.finfo(values.dtype).eps * finite.abs().max())


def across_shapes(values: Tensor) -> float:
    """The same where the shapes or the places of rows differ: half of the digits, `sqrt(eps)`.

    Kernels are chosen by shape, and their sums run in another order.
    """
    eps = torch.finfo(values.dtype).eps if values.is_floating_point() else 1.0
    return rounding(values, eps**-0.5)
