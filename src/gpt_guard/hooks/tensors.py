"""Tensors inside whatever a module takes or returns, and the two tests for non-finite values.

The cheap test is one reading pass: a NaN or an infinity always survives a sum, but a sum of finite values may overflow,
so `describe` must confirm before anything is said. Where the tensor cannot be read again later (on an accelerator),
hooks take minimum and maximum in one pass instead: both carry NaN, and neither can overflow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from gpt_guard.records import TensorStats

_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_HALF = (torch.float16, torch.bfloat16)
_MAX_DEPTH = 8
# A longer list that starts with a number or a string is data, not a structure of tensors.
_LONG = 64


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
        if len(value) > _LONG and isinstance(value[0], (int, float, str, bytes)):
            return
        for place, part in enumerate(value):
            yield f"[{place}]", part
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif hasattr(value, "loss") or hasattr(value, "logits"):
        for name in ("loss", "logits"):
            if isinstance(getattr(value, name, None), Tensor):
                yield f".{name}", getattr(value, name)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes (torch's DTensor): what this one holds is `to_local()`."""
    return hasattr(tensor, "to_local")


def shard_of(tensor: Any) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def is_freed(tensor: Tensor) -> bool:
    """Whether the memory of a dense tensor was given back while the tensor lives on, as FSDP does between its uses.

    A read of it ends the process.
    """
    if tensor.layout is not torch.strided or not tensor.numel() or is_sharded(tensor) or tensor.is_meta:
        return False
    try:
        return tensor.untyped_storage().nbytes() == 0
    except RuntimeError:
        # A kind without a storage of its own, as a nested or a fake one.
        return False


def readable(tensor: Tensor) -> Tensor | None:
    """The values to test as one dense real tensor, without a copy where possible; None if there is nothing to test.

    Integer, bool and empty tensors have nothing to test. Complex numbers become pairs, sparse tensors their values, a
    sharded tensor the shard of this process, 8-bit floats a float32 copy (torch cannot reduce them).
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if is_freed(tensor):
        return None
    values = shard_of(tensor.detach())
    if values.layout is not torch.strided:
        values = _stored_values(values)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype.itemsize == 1:
        values = values.float()
    return values if values.numel() else None


def _stored_values(values: Tensor) -> Tensor:
    return values._values() if values.layout is torch.sparse_coo else values.values()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place; -1 for an inference tensor, which does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def watchable(tensor: Tensor) -> bool:
    """Whether `readable` can handle this kind of tensor: one with values of its own, in a layout that has them in one.

    Not meta, fake, quantized, nested or MKL-DNN tensors, nor those inside of a torch.func transform such as vmap, which
    stand for many and are gone afterwards.
    """
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout in _LAYOUTS and getattr(tensor, "fake_mode", None) is None


def kind_of(tensor: Tensor) -> str:
    """What makes a tensor one that is not watchable, in a word."""
    for name in ("is_meta", "is_quantized", "is_nested"):
        if getattr(tensor, name):
            return name.removeprefix("is_")
    if is_functorch_wrapped_tensor(tensor):
        return "torch.func"
    if tensor.layout in _LAYOUTS:
        return "fake"
    return str(tensor.layout).removeprefix("torch.")


def total(values: Tensor) -> Tensor:
    """Sum as a 0-dim tensor, half types in float32: NaN and infinities always survive; does not read the device."""
    return values.sum(dtype=torch.float32) if values.dtype in _HALF else values.sum()


def is_bad(low: float, high: float) -> bool:
    """Whether extremes mean trouble: NaN or +inf; a minimum of -inf alone is what a mask looks like."""
    return math.isnan(low) or math.isnan(high) or high == math.inf


def describe(tensor: Tensor) -> TensorStats | None:
    """Count the non-finite elements of a tensor exactly; None if all are finite. Reads the device, copies: rare use.

    A complex element counts once, whichever of its parts is bad. Of a sparse tensor the stored values are described.
    """
    values = readable(tensor) if watchable(tensor) else None
    if values is None:
        return None
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return None
    good = values[finite]
    parts = tensor.is_complex()
    bad = (~finite).any(-1) if parts else ~finite
    dense = bad.shape == tensor.shape
    # Row by row: the places of all bad elements may take more memory than the tensor itself.
    rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten() if dense and bad.dim() else bad.new_zeros(0)
    return TensorStats(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        numel=bad.numel(),
        nan=_count(values.isnan(), parts),
        pos_inf=_count(values == math.inf, parts),
        neg_inf=_count(values == -math.inf, parts),
        finite_min=float(good.min()) if good.numel() else None,
        finite_max=float(good.max()) if good.numel() else None,
        first_bad=(*rows[:1].tolist(), *(bad[rows[0]] if bad.dim() else bad).nonzero()[0].tolist()) if dense else None,
        bad_rows=tuple(rows[:5].tolist()),
        bad_row_count=rows.numel(),
    )


def _count(chosen: Tensor, parts: bool) -> int:
    return int((chosen.any(-1) if parts else chosen).sum())


def looks_bad(tensor: Tensor) -> TensorStats | None:
    """Exact statistics if a tensor holds NaN or +inf; None if it is fine or only -inf (a mask). Reads the device."""
    stats = describe(tensor)
    return None if stats is None or stats.only_neg_inf else stats
