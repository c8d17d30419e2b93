"""What the values of a tensor are: finite or not, and the figures that explain what an operation made of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.tensors import describe, readable, total, watchable
from gpt_guard.records import TensorStats

_LISTED = 5
HALF = (torch.float16, torch.bfloat16)


class Flags(NamedTuple):
    """Which kinds of non-finite values a tensor holds; at least one of them."""

    nan: bool
    pos_inf: bool
    neg_inf: bool

    @property
    def only_neg_inf(self) -> bool:
        """True for what a mask looks like."""
        return self.neg_inf and not self.nan and not self.pos_inf


def real(tensor: Tensor) -> Tensor | None:
    """The values as one dense real tensor without history; None where there is nothing to test."""
    return readable(tensor) if watchable(tensor) else None


def flags(tensor: Tensor) -> Flags | None:
    """The kinds of non-finite values in a tensor, or None if all are finite. Reads the device.

    A sum comes first, one reading pass; only where it is not finite, which a sum of finite values may be too, are the
    three exact tests run.
    """
    values = real(tensor)
    if values is None or math.isfinite(float(total(values))):
        return None
    found = Flags(
        nan=bool(values.isnan().any()),
        pos_inf=bool((values == math.inf).any()),
        neg_inf=bool((values == -math.inf).any()),
    )
    return found if any(found) else None


def bad(tensor: Tensor) -> Tensor | None:
    """Which elements are NaN or infinite, in the tensor's own shape; None for a layout without places."""
    if not watchable(tensor) or tensor.layout is not torch.strided:
        return None
    return ~torch.isfinite(tensor.detach())


def measure(tensor: Tensor) -> TensorStats:
    """Shape, dtype and exact figures of any tensor, finite ones included. Reads the device, copies: rare use."""
    stats = describe(tensor)
    if stats is not None:
        return stats
    values = real(tensor)
    if values is None and not (tensor.is_floating_point() or tensor.is_complex()):
        values = tensor.detach() if watchable(tensor) and tensor.layout is torch.strided and tensor.numel() else None
    low, high = (None, None) if values is None else (float(values.min()), float(values.max()))
    return TensorStats(
        shape=tuple(tensor.shape),
        dtype=dtype_of(tensor),
        device=str(tensor.device),
        numel=tensor.numel(),
        finite_min=low,
        finite_max=high,
    )


def count(chosen: Tensor) -> int:
    """Number of true elements."""
    return int(chosen.sum())


def largest(tensor: Tensor) -> float:
    """The largest magnitude among the finite values, 0 if there is none."""
    values = real(tensor)
    if values is None:
        return 0.0
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def dtype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype: "float16"."""
    return str(tensor.dtype).removeprefix("torch.")


def limit(dtype: torch.dtype) -> float:
    """The largest finite value of a floating dtype (65504 for float16)."""
    return torch.finfo(dtype).max


def dead_rows(tensor: Tensor, dim: int) -> tuple[int, int]:
    """How many rows along `dim` are -inf throughout, and how many rows there are."""
    if tensor.dim() == 0:
        return (1 if float(tensor) == -math.inf else 0, 1)
    rows = (tensor.detach() == -math.inf).all(dim)
    return count(rows), rows.numel()


def dead_text(tensor: Tensor, dim: int) -> str:
    """The same as text, with the first few samples, rows of dimension 0, that have such rows."""
    dead, rows = dead_rows(tensor, dim)
    text = f"{dead} of {many(rows, 'row')} {be(dead)} -inf throughout"
    if tensor.dim() < 2 or dim % tensor.dim() == 0:
        return text
    samples = (tensor.detach() == -math.inf).all(dim).reshape(tensor.shape[0], -1).any(1).nonzero().flatten().tolist()
    listed = ", ".join(map(str, samples[:_LISTED])) + (", ..." if len(samples) > _LISTED else "")
    return f"{text}, in {'sample' if len(samples) == 1 else 'samples'} {listed}"


def figure(value: float) -> str:
    """A number as it is said: four significant digits, whole numbers as they are up to a million."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def be(number: int) -> str:
    """The verb that goes with a number of things."""
    return "is" if number == 1 else "are"


def many(number: int, one: str, more: str | None = None) -> str:
    """A number with its noun: "1 zero", "3 zeros"."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def described(tensor: Tensor) -> str:
    """A number for a scalar; shape, dtype and range for anything larger. Reads the device."""
    if tensor.numel() == 1 and not tensor.is_complex():
        return f"{float(tensor.detach()):.6g}"
    stats = measure(tensor)
    kind = f"{stats.dtype} {list(stats.shape)}"
    if stats.bad:
        return f"non-finite in {stats.bad} of {many(stats.numel, 'element')} ({kind})"
    if stats.finite_min is None:
        return f"finite ({kind})"
    return f"finite ({kind}, between {stats.finite_min:.4g} and {stats.finite_max:.4g})"
