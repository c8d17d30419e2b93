"""Tensors inside whatever a module takes or returns, and the two tests for non-finite values.

The cheap test is one reading pass: a NaN or an infinity always survives a sum, but a sum of finite values may overflow,
so `describe` must confirm before anything is said. Where the tensor cannot be read again later (on an accelerator),
`extremes` takes minimum and maximum in one pass instead: both carry NaN, and neither can overflow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpt_guard.records import TensorStats

_HALF = (torch.float16, torch.bfloat16)
_MAX_DEPTH = 8


def walk(value: Any, position: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a nested structure with its position, such as `[1]['loss']` or `.logits`.

    Goes into tuples, lists, mappings (a transformers ModelOutput is one), dataclasses, named tuples and packed
    sequences; anything else is left alone.
    """
    if isinstance(value, Tensor):
        yield position, value
    elif depth < _MAX_DEPTH:
        for step, part in _parts(value):
            yield from walk(part, position + step, depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, (tuple, list)):
        for place, part in enumerate(value):
            yield f"[{place}]", part
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif hasattr(value, "loss") or hasattr(value, "logits"):
        for name in ("loss", "logits"):
            if isinstance(getattr(value, name, None), Tensor):
                yield f".{name}", getattr(value, name)


def readable(tensor: Tensor) -> Tensor | None:
    """The values to test as one dense real tensor, without a copy where possible; None if there is nothing to test.

    Integer, bool and empty tensors have nothing to test. Complex numbers become pairs, sparse tensors their values, a
    sharded tensor the shard of this process, 8-bit floats a float32 copy (torch cannot reduce them).
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    if values.layout is not torch.strided:
        values = _stored_values(values)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype.itemsize == 1:
        values = values.float()
    return values if values.numel() else None


def _stored_values(values: Tensor) -> Tensor:
    if values.layout is torch.sparse_coo:
        return values._values()
    return values.values()


def watchable(tensor: Tensor) -> bool:
    """Whether `readable` can handle this kind of tensor: not meta, fake, quantized, nested or MKL-DNN ones."""
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.layout in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def total(values: Tensor) -> Tensor:
    """Sum as a 0-dim tensor, half types in float32: NaN and infinities always survive; does not read the device."""
    return values.sum(dtype=torch.float32) if values.dtype in _HALF else values.sum()


def extremes(values: Tensor) -> Tensor:
    """Minimum and maximum as a float32 tensor `[2]`: NaN in either shows NaN, and nothing overflows."""
    low, high = torch.aminmax(values)
    return torch.stack((low, high)).float()


def is_bad(low: float, high: float) -> bool:
    """Whether extremes mean trouble: NaN or +inf; a minimum of -inf alone is what a mask looks like."""
    return math.isnan(low) or math.isnan(high) or high == math.inf


def describe(tensor: Tensor) -> TensorStats | None:
    """Count the non-finite elements of a tensor exactly; None if all are finite. Reads the device, copies: rare use."""
    values = readable(tensor) if watchable(tensor) else None
    if values is None:
        return None
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return None
    good = values[finite]
    where = (~finite).nonzero()
    rows = where[:, 0].unique() if values.dim() and values.shape == tensor.shape else where.new_zeros(0)
    return TensorStats(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        numel=tensor.numel(),
        nan=int(values.isnan().sum()),
        pos_inf=int((values == math.inf).sum()),
        neg_inf=int((values == -math.inf).sum()),
        finite_min=float(good.min()) if good.numel() else None,
        finite_max=float(good.max()) if good.numel() else None,
        first_bad=tuple(where[0].tolist()),
        bad_rows=tuple(rows[:5].tolist()),
        bad_row_count=rows.numel(),
    )


def looks_bad(tensor: Tensor) -> TensorStats | None:
    """Exact statistics if a tensor holds NaN or +inf; None if it is fine or only -inf (a mask). Reads the device."""
    stats = describe(tensor)
    return None if stats is None or stats.only_neg_inf else stats
