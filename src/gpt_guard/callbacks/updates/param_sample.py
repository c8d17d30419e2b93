"""What a step did to tensors, measured: a fixed sample of each tensor before and after, or all of it.

Nothing here reads the device. Values are compared as they are stored: half types are widened to float32 first, which
is exact. A norm of zero is a suspicion and no more, since squares below 1e-45 vanish: param_confirm compares element by
element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NARROW = 4


class Change(NamedTuple):
    """What one group of tensors did in a step, still on the device.

    `vector` is 1-D and holds for each of the n tensors at `places` the norm of its change, then the norms of the values
    before; for half types the shares of measured elements that changed follow. Its last three entries are the norms of
    change and values over all that counts towards the overall ratio, as estimated from the sample, and the largest
    absolute change.
    """

    places: list[int]
    vector: Tensor


class Rows:
    """Tensors of one device and dtype, each seen through a view of at most `size` elements; no reading of the device.

    A view shares its storage with the tensor, so taking the sample is one fused copy. Rows of short tensors end in
    zeros that never change: equally long rows let one reduction serve all of them.
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor], counts: Sequence[bool], size: int) -> None:
        first = tensors[0]
        self.places = places
        self._size = size
        self._narrow = first.dtype.itemsize < NARROW
        self._like = [layout(tensor) for tensor in tensors]
        self._views = [sample_view(tensor, size) for tensor in tensors]
        # Change and values in one buffer, so that one reduction gives the norms of both. All results have their place
        # in one vector from the start: each allocation or join costs as much as the arithmetic.
        self._both = first.new_zeros((2, len(tensors), size))
        self._after, self._before = self._both.unbind(0)
        self._after_rows, self._before_rows = self._rows(self._after), self._rows(self._before)
        wide = torch.float32 if self._narrow else first.dtype
        lengths = [view.numel() for view in self._views]
        scale = [
            math.sqrt(tensor.numel() / length) if counted else 0.0
            for tensor, length, counted in zip(tensors, lengths, counts, strict=True)
        ]
        self._lengths = torch.tensor(lengths, dtype=wide, device=first.device)
        self._scale = torch.tensor(scale, dtype=wide, device=first.device)
        parts = 3 if self._narrow else 2
        self._vector = torch.zeros(parts * len(tensors) + 3, dtype=wide, device=first.device)
        self._norms = self._vector[: 2 * len(tensors)].view(2, -1)
        self._shares = self._vector[2 * len(tensors) : -3]
        self._scaled = torch.zeros_like(self._norms)
        self._ends, self._largest = self._vector[-3:-1], self._vector[-1]
        self._fresh = True

    def _rows(self, buffer: Tensor) -> list[Tensor]:
        return [row[: view.numel()] for row, view in zip(buffer.unbind(0), self._views, strict=True)]

    def rebind(self, tensors: Sequence[Tensor | None]) -> bool:
        """Look at the same tensors in new storage; False if they are not laid out as before."""
        mine = alike(self._like, [tensors[place] for place in self.places])
        if mine is not None:
            self._views = [sample_view(tensor, self._size) for tensor in mine]
        return mine is not None

    def take(self, *, known: bool) -> bool:
        """Remember the values before a step; they are taken anew in each, and never `known`."""
        torch._foreach_copy_(self._before_rows, self._views)
        return not known

    def change(self) -> Change:
        """Compare with the values now."""
        torch._foreach_copy_(self._after_rows, self._views)
        # In place: the padding stays zero, and the rows are overwritten by the next step anyway.
        both, delta, before = self._both, self._after, self._before
        if self._narrow:
            both = both.float()
            delta, before = both.unbind(0)
        delta.sub_(before)
        torch.linalg.vector_norm(both, 2, 2, out=self._norms)
        if self._narrow:
            torch.div((delta != 0).sum(1), self._lengths, out=self._shares)
        if self._fresh:
            # A matrix that starts at zero (an adapter's second half, a zero-initialised projection) has no ratio yet.
            self._fresh = False
            self._scale *= self._norms[1] > 0
        torch.linalg.vector_norm(delta, math.inf, out=self._largest)
        torch.mul(self._norms, self._scale, out=self._scaled)
        torch.linalg.vector_norm(self._scaled, 2, 1, out=self._ends)
        return Change(self.places, self._vector)


class Full:
    """Tensors of one device and dtype, all elements: exact, at the price of one copy of them in memory."""

    def __init__(self, places: list[int], tensors: Sequence[Tensor], counts: Sequence[bool]) -> None:
        first = tensors[0]
        self.places = places
        self._narrow = first.dtype.itemsize < NARROW
        self._like = [layout(tensor) for tensor in tensors]
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        wide = torch.float32 if self._narrow else first.dtype
        self._lengths = torch.tensor([float(tensor.numel()) for tensor in tensors], dtype=wide, device=first.device)
        self._scale = torch.tensor([float(counted) for counted in counts], dtype=wide, device=first.device)
        self._fresh = True

    def rebind(self, tensors: Sequence[Tensor | None]) -> bool:
        """Look at the same tensors in new storage; False if they are not laid out as before."""
        mine = alike(self._like, [tensors[place] for place in self.places])
        if mine is not None:
            self._tensors = mine
        return mine is not None

    def take(self, *, known: bool) -> bool:
        """Remember the values before a step; they are taken anew in each, and never `known`."""
        torch._foreach_copy_(self._copies, self._tensors)
        return not known

    def change(self) -> Change:
        """Compare with the values now."""
        before, after = self._copies, self._tensors
        if self._narrow:
            before, after = [tensor.float() for tensor in before], [tensor.float() for tensor in after]
        delta = list(torch._foreach_sub(after, before))
        norms = torch.stack(torch._foreach_norm(delta + before, 2)).view(2, -1)
        largest = torch.stack(torch._foreach_norm(delta, math.inf)).amax()
        parts = [norms.view(-1)]
        if self._narrow:
            parts.append(torch.stack([torch.count_nonzero(each) for each in delta]) / self._lengths)
        if self._fresh:
            self._fresh = False
            self._scale *= norms[1] > 0
        parts += [torch.linalg.vector_norm(norms * self._scale, 2, 1), largest.view(1)]
        return Change(self.places, torch.cat(parts))


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def layout(tensor: Tensor) -> Layout:
    """How a tensor lies in its storage."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def alike(like: Sequence[Layout], tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The tensors, if each is laid out as it was before; None otherwise."""
    found = [tensor for tensor in tensors if tensor is not None]
    return found if [layout(tensor) for tensor in found] == list(like) else None


def overall(changes: Sequence[Change]) -> tuple[Tensor, Tensor]:
    """Update-to-weight ratio over all that counts (NaN without any) and the largest change, as device scalars."""
    if len(changes) == 1:
        moved, held, largest = changes[0].vector[-3:].unbind()
        return moved / held, largest
    vectors = [change.vector[-3:] for change in changes]
    ends = torch.stack([vector.to(vectors[0].device, torch.float32) for vector in vectors])
    moved, held = torch.linalg.vector_norm(ends[:, :2], 2, 0)
    return moved / held, ends[:, 2].amax()


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
