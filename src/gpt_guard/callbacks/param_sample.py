"""What a step did to tensors, measured: a fixed sample of each tensor before and after, or all of it.

Nothing here reads the device. Differences are taken between the values as they are stored, so "did it change" is exact
for every dtype; only then are half types widened to float32 for the norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NARROW = 4


@dataclass(frozen=True)
class Change:
    """What one group of tensors did in a step, still on the device.

    `vector` is 1-D, `[3 * n]`: for each of the n tensors at `places` the share of its measured elements that changed
    (or, for float32 and wider, the largest absolute change: only zero or not matters there), then the norm of the
    change, then the norm of the values before. `moved` and `weight` are the squared norms over all matrices, scaled up
    from sample to tensor; `largest` is the largest absolute change.
    """

    places: list[int]
    vector: Tensor
    moved: Tensor
    weight: Tensor
    largest: Tensor


class Rows:
    """Tensors of one device and dtype, each seen through a view of at most `size` elements.

    A view shares its storage with the tensor, so taking the sample is one concatenation. Short tensors are padded with
    zeros that never change, which makes every row equally long and lets one reduction serve all of them.
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor], size: int) -> None:
        first = tensors[0]
        self.places = places
        self._size = size
        self._narrow = first.dtype.itemsize < _NARROW
        pad = first.new_zeros(size)
        self._like = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        views = [sample_view(tensor, size) for tensor in tensors]
        self._pad = pad
        self._views = self._padded(views)
        shape = (len(tensors) * size,)
        self._before = first.new_zeros(shape)
        self._after = first.new_zeros(shape)
        wide = torch.float32 if self._narrow else first.dtype
        self._share = torch.tensor([1.0 / view.numel() for view in views], dtype=wide, device=first.device)
        self._scale = torch.tensor(_scales(tensors, views), dtype=wide, device=first.device)
        self._fresh = True

    def _padded(self, views: Sequence[Tensor]) -> list[Tensor]:
        return [part for view in views for part in (view, self._pad[view.numel() :]) if part.numel()]

    def rebind(self, tensors: Sequence[Tensor | None]) -> bool:
        """Look at the same tensors in new storage; False if they are not laid out as before."""
        mine = _alike(self._like, [tensors[place] for place in self.places])
        if mine is not None:
            self._views = self._padded([sample_view(tensor, self._size) for tensor in mine])
        return mine is not None

    def take(self) -> None:
        """Remember the values before a step."""
        torch.cat(self._views, out=self._before)

    def change(self) -> Change:
        """Compare with the values now."""
        torch.cat(self._views, out=self._after)
        before, after = self._before.view(-1, self._size), self._after.view(-1, self._size)
        if self._narrow:
            before, after = before.float(), after.float()
        delta = after.sub_(before)
        norm, weight = torch.linalg.vector_norm(delta, 2, 1), torch.linalg.vector_norm(before, 2, 1)
        extent = delta.abs().amax(1)
        if self._fresh:
            # A matrix that starts at zero (an adapter's second half, a zero-initialised projection) has no ratio yet.
            self._fresh = False
            self._scale *= weight > 0
        share = (delta != 0).sum(1) * self._share if self._narrow else extent
        moved, held = norm * self._scale, weight * self._scale
        vector = torch.cat((share, norm, weight))
        return Change(self.places, vector, torch.dot(moved, moved), torch.dot(held, held), extent.amax())


class Full:
    """Tensors of one device and dtype, all elements: exact, at the price of one copy of them in memory."""

    def __init__(self, places: list[int], tensors: Sequence[Tensor], size: int = 0) -> None:
        first = tensors[0]
        self.places = places
        self._narrow = first.dtype.itemsize < _NARROW
        self._like = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        wide = torch.float32 if self._narrow else first.dtype
        self._sizes = torch.tensor([float(tensor.numel()) for tensor in tensors], dtype=wide, device=first.device)
        self._scale = torch.tensor([float(tensor.dim() >= 2) for tensor in tensors], dtype=wide, device=first.device)
        self._fresh = True

    def rebind(self, tensors: Sequence[Tensor | None]) -> bool:
        """Look at the same tensors in new storage; False if they are not laid out as before."""
        mine = _alike(self._like, [tensors[place] for place in self.places])
        if mine is not None:
            self._tensors = mine
        return mine is not None

    def take(self) -> None:
        """Remember the values before a step."""
        torch._foreach_copy_(self._copies, self._tensors)

    def change(self) -> Change:
        """Compare with the values now."""
        before, after = self._copies, self._tensors
        if self._narrow:
            before, after = [tensor.float() for tensor in before], [tensor.float() for tensor in after]
        delta = list(torch._foreach_sub(after, before))
        norm = torch.stack(torch._foreach_norm(delta, 2))
        weight = torch.stack(torch._foreach_norm(before, 2))
        extent = torch.stack(torch._foreach_norm(delta, math.inf))
        if self._fresh:
            self._fresh = False
            self._scale *= weight > 0
        counts = [torch.count_nonzero(each) for each in delta] if self._narrow else []
        share = torch.stack(counts) / self._sizes if counts else extent
        moved, held = norm * self._scale, weight * self._scale
        vector = torch.cat((share, norm, weight))
        return Change(self.places, vector, torch.dot(moved, moved), torch.dot(held, held), extent.amax())


Sampler = Rows | Full
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _alike(like: Sequence[Layout], tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The tensors, if each is laid out as it was before; None otherwise."""
    found = [tensor for tensor in tensors if tensor is not None]
    return found if [(t.shape, t.stride(), t.dtype, t.device) for t in found] == list(like) else None


def samplers(tensors: Sequence[Tensor], size: int | None) -> list[Sampler]:
    """One sampler for each device and dtype; `size` None measures all elements."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    make: Callable[..., Any] = Full if size is None else Rows
    return [make(places, [tensors[place] for place in places], size) for places in groups.values()]


def overall(changes: Sequence[Change]) -> tuple[Tensor, Tensor]:
    """Update-to-weight ratio over all matrices (NaN without any) and the largest change, as device scalars."""
    if len(changes) == 1:
        only = changes[0]
        return (only.moved / only.weight).sqrt(), only.largest
    device = changes[0].moved.device
    sums = [
        torch.stack([getattr(each, field).to(device, torch.float32) for each in changes])
        for field in ("moved", "weight", "largest")
    ]
    return (sums[0].sum() / sums[1].sum()).sqrt(), sums[2].amax()


def local(tensor: Tensor) -> Tensor | None:
    """The part of a parameter that this process holds, as real floating-point values; None if it cannot be compared.

    A sharded tensor gives its shard, a complex one its pairs. Integer, quantized, sparse and meta tensors give None.
    """
    values = tensor.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    if values.layout is not torch.strided or values.is_meta or values.is_quantized or not values.numel():
        return None
    if values.is_complex():
        return torch.view_as_real(values)
    return values if values.is_floating_point() else None


def sample_view(tensor: Tensor, size: int) -> Tensor:
    """A 1-D view of at most `size` elements, evenly spread in storage order.

    The stride shares no factor with the last dimension: a sample of one and the same column would see nothing of the
    others.
    """
    flat = _flat(tensor.detach())
    count = flat.numel()
    if count <= size:
        return flat
    stride = count // size
    while stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride -= 1
    offset = (count - (size - 1) * stride - 1) // 2
    return flat[offset : offset + (size - 1) * stride + 1 : stride]


def _flat(tensor: Tensor) -> Tensor:
    """The elements in storage order as a view; of a tensor with gaps or overlaps, one line along its longest side."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    extent = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if extent == tensor.numel() and 0 not in tensor.stride():
        return tensor.as_strided((extent,), (1,), tensor.storage_offset())
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    index: list[Any] = [length // 2 for length in tensor.shape]
    index[longest] = slice(None)
    return tensor[tuple(index)]


def _scales(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> list[float]:
    """What turns the norm over a sample into an estimate of the norm over the tensor; 0 for what is no matrix."""
    pairs = zip(tensors, views, strict=True)
    return [math.sqrt(tensor.numel() / view.numel()) if tensor.dim() >= 2 else 0.0 for tensor, view in pairs]
