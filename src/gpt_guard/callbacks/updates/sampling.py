"""What `step()` did to parameters: a fixed sample of each, copied before the step and compared after it.

Values are compared as they are stored: half types are widened to float32, which is exact. A norm of zero is a suspicion
and no more, since squares below 1e-45 vanish: `movement` then compares element by element. The device is read only
where that is free; elsewhere the figures of each dtype and device are one vector in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.hooks.tensors import is_freed, shard_of
from gpt_guard.hooks.watch import Watch

_NARROW = 4
_UNCHANGED_SAMPLE = 64
_REQUIRES_GRAD = attrgetter("requires_grad")


class StepFigures:
    """What each of some tensors did in a step, in their order, and all of them together, as floats.

    `norm` is that of the change, `before` that of the values before; `share` the share of elements that changed, known
    for half types only and elsewhere the same as `norm`: there it only matters whether it is zero. `least` is the
    smallest share. `moved` and `held` are the norms of change and values before over all that counts, `ratio` is the
    overall update-to-weight ratio, NaN where nothing counts; `largest` the largest absolute change.
    """

    __slots__ = ("before", "held", "largest", "least", "moved", "norm", "ratio", "share")

    def __init__(
        self,
        norm: Sequence[float],
        before: Sequence[float],
        share: Sequence[float],
        moved: float,
        held: float,
        largest: float,
    ) -> None:
        self.norm = norm
        self.before = before
        self.share = share
        self.least = min(share)
        self.moved = moved
        self.held = held
        self.largest = largest
        self.ratio = moved / held if held > 0.0 else math.nan

    @classmethod
    def unpack(cls, places: Sequence[Sequence[int]], vectors: Sequence[list[float]]) -> StepFigures:
        """The figures of all tensors from the vectors of several samples, with the places of their tensors."""
        parts = []
        for own, values in zip(places, vectors, strict=True):
            count = len(own)
            norm, share = values[:count], values[2 * count : -3]
            parts.append(cls(norm, values[count : 2 * count], share or norm, *values[-3:]))
        if len(parts) == 1:
            # The usual case, tensors of one dtype on one device: nothing to join.
            return parts[0]
        total = sum(map(len, places))
        norm, before, share = [0.0] * total, [0.0] * total, [0.0] * total
        for own, part in zip(places, parts, strict=True):
            for place, *row in zip(own, part.norm, part.before, part.share, strict=True):
                norm[place], before[place], share[place] = row
        moved, held = math.hypot(*[part.moved for part in parts]), math.hypot(*[part.held for part in parts])
        return cls(norm, before, share, moved, held, max([part.largest for part in parts]))

    def ratios(self) -> list[float]:
        """The ratio of each tensor; infinite for what was zero before and moved."""
        rows = zip(self.norm, self.before, strict=True)
        return [norm / weight if weight > 0.0 else math.inf if norm else 0.0 for norm, weight in rows]


class _Sample:
    """Tensors of one device and dtype, each seen through a view of at most `size` elements.

    A view shares its storage with the tensor, so taking the sample is one fused copy. Rows of short tensors end in
    zeros that never change: equally long rows let one reduction serve all of them.
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor], counts: Sequence[bool], size: int) -> None:
        self.places = places
        self._size = size
        self._like = [_layout(tensor) for tensor in tensors]
        self._views = self._look_at(tensors)
        first, count = tensors[0], len(tensors)
        self._narrow = first.dtype.itemsize < _NARROW
        self._wide = torch.float64 if first.dtype is torch.float64 else torch.float32
        lengths = [view.numel() for view in self._views]
        scales = [
            math.sqrt(tensor.numel() / length) if counted else 0.0
            for tensor, length, counted in zip(tensors, lengths, counts, strict=True)
        ]
        self._lengths = torch.tensor(lengths, dtype=self._wide, device=first.device)
        self._scales = torch.tensor(scales, dtype=self._wide, device=first.device)
        # All results have their place in one vector from the start: a join costs more than the arithmetic.
        self._result = torch.zeros((3 if self._narrow else 2) * count + 3, dtype=self._wide, device=first.device)
        self._norms, self._shares = self._result[: 2 * count].view(2, -1), self._result[2 * count : -3]
        self._scaled = torch.zeros_like(self._norms)
        self._ends, self._largest = self._result[-3:-1], self._result[-1]
        self._fresh = True
        self._make_room(count, lengths, first)

    def _look_at(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [sample_view(tensor, self._size) for tensor in tensors]

    def _make_room(self, count: int, lengths: Sequence[int], first: Tensor) -> None:
        # Change and values before in one buffer, so that one reduction gives the norms of both.
        self._both = torch.zeros((2, count, self._size), dtype=self._wide, device=first.device)
        self._change, self._before = self._both.unbind(0)
        self._after_rows, self._before_rows = (
            [row[:length] for row, length in zip(part.unbind(0), lengths, strict=True)] for part in self._both.unbind(0)
        )

    def rebind(self, tensors: Sequence[Tensor | None]) -> bool:
        """Look at the same tensors in new storage; False if they are not laid out as before."""
        mine = [tensor for place in self.places if (tensor := tensors[place]) is not None]
        if [_layout(tensor) for tensor in mine] != self._like:
            return False
        self._views = self._look_at(mine)
        return True

    def take(self) -> None:
        """Copy the values before a step."""
        torch._foreach_copy_(self._before_rows, self._views)

    def compare(self) -> Tensor:
        """What the step did, for `StepFigures.unpack`: a vector on the device that the next step overwrites."""
        self._measure()
        if self._fresh:
            # A matrix that starts at zero (an adapter's second half, a zero-initialised projection) has no ratio yet.
            self._fresh = False
            self._scales *= self._norms[1] > 0
        torch.mul(self._norms, self._scales, out=self._scaled)
        torch.linalg.vector_norm(self._scaled, 2, 1, out=self._ends)
        return self._result

    def _measure(self) -> None:
        torch._foreach_copy_(self._after_rows, self._views)
        # In place: the padding stays zero, and the rows are overwritten by the next step anyway.
        change = self._change.sub_(self._before)
        torch.linalg.vector_norm(self._both, 2, 2, out=self._norms)
        if self._narrow:
            torch.div(torch.count_nonzero(change, dim=1), self._lengths, out=self._shares)
        # The maximum norm takes eight times as long as this.
        torch.amax(change.abs_(), (0, 1), out=self._largest)


class _WholeTensors(_Sample):
    """All elements of them: exact, at the price of one copy in memory."""

    def _look_at(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    def _make_room(self, count: int, lengths: Sequence[int], first: Tensor) -> None:
        self._before_rows = [torch.empty_like(view) for view in self._views]

    def _measure(self) -> None:
        before, after = self._before_rows, self._views
        if self._narrow:
            before, after = [tensor.float() for tensor in before], [tensor.float() for tensor in after]
        change = list(torch._foreach_sub(after, before))
        torch.stack(torch._foreach_norm(change + before, 2), out=self._result[: 2 * len(change)])
        if self._narrow:
            torch.div(torch.stack([torch.count_nonzero(each) for each in change]), self._lengths, out=self._shares)
        torch.amax(torch.stack(torch._foreach_norm(change, math.inf)), 0, out=self._largest)


class SampledParameters:
    """The measured tensors of one optimizer, in order, and facts about them that hold until `outdated`.

    `names`, `tensors`, `groups` (index of the param group), `own` (the model holds it), `trains` and `half` run in
    parallel; `left_out` names tensors that cannot be compared, `weights` counts the elements of matrices. Squares of
    gradients up to `square_limit` stay in the range of each dtype.
    """

    def __init__(self, watch: Watch, index: int, size: int | None) -> None:
        self.index = index
        everything = _held_now(watch, index)
        groups = watch.optimizers[index].param_groups
        model = {id(parameter) for parameter in watch.model.parameters()}
        group_of = {id(t): place for place, group in enumerate(groups) for t in group["params"]}
        values = {name: local(tensor) for name, tensor in everything.items()}
        self.names = [name for name, value in values.items() if value is not None]
        self.left_out = [name for name, value in values.items() if value is None and _has_elements(everything[name])]
        self.tensors = [everything[name] for name in self.names]
        self.groups = [group_of[id(tensor)] for tensor in self.tensors]
        self.own = [id(tensor) in model for tensor in self.tensors]
        self.trains = [tensor.requires_grad for tensor in self.tensors]
        self.half = [tensor.dtype.itemsize < _NARROW for tensor in self.tensors]
        self.weights = sum(tensor.numel() for tensor in self.tensors if tensor.dim() >= 2)
        ranges = [torch.finfo(tensor.dtype).max for tensor in self.tensors if not tensor.is_complex()]
        self.square_limit = math.sqrt(min(ranges, default=math.inf))
        self.any_half = any(self.half)
        self.any_frozen = not all(self.trains)
        self._members = [list(group["params"]) for group in groups]
        self._spoilt = False
        self._plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in self.tensors)
        self._pointers = self._addresses()
        self._samples = _samples([value for value in values.values() if value is not None], size)

    @property
    def places(self) -> list[list[int]]:
        """The places of the tensors that each vector of `compare` tells of."""
        return [sample.places for sample in self._samples]

    def outdated(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds other tensors by now, or one has other storage or was frozen; no device work."""
        groups = optimizer.param_groups
        if self._spoilt or len(groups) != len(self._members):
            return True
        for group, members in zip(groups, self._members, strict=True):
            params = group["params"]
            if len(params) != len(members) or not all(map(is_, params, members)):
                return True
        return self._addresses() != self._pointers or list(map(_REQUIRES_GRAD, self.tensors)) != self.trains

    def take(self) -> None:
        """Copy the values before the step."""
        for sample in self._samples:
            sample.take()

    def compare(self) -> list[Tensor]:
        """What the step did, on the device. Empty if it left nothing to compare with: another dtype or shape."""
        addresses = self._addresses()
        if addresses != self._pointers:
            # An optimizer written by hand may assign `p.data = ...`: our views are on the old storage.
            values = [local(tensor) for tensor in self.tensors]
            self._pointers = addresses
            self._spoilt = not all(sample.rebind(values) for sample in self._samples)
        return [] if self._spoilt else [sample.compare() for sample in self._samples]

    def _addresses(self) -> list[int]:
        if self._plain:
            return list(map(Tensor.data_ptr, self.tensors))
        values = [local(tensor) for tensor in self.tensors]
        return [-1 if value is None else value.data_ptr() for value in values]


def _held_now(watch: Watch, index: int) -> dict[str, Tensor]:
    """What optimizer `index` holds, by name; unlike `watch.held_by` with what was added or replaced since entry."""
    names = {id(parameter): name for name, parameter in watch.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for group, entries in enumerate(watch.optimizers[index].param_groups):
        for place, tensor in enumerate(entries["params"]):
            made_up = f"optimizer[{index}].param_groups[{group}][{place}]"
            found[names.get(id(tensor)) or watch.name_of(tensor) or made_up] = tensor
    return found


def _samples(tensors: Sequence[Tensor], size: int | None) -> list[_Sample]:
    """One for each device and dtype; `size` None measures all elements."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    matrices = any(tensor.dim() >= 2 for tensor in tensors)
    kind = _WholeTensors if size is None else _Sample
    found = []
    for places in groups.values():
        members = [tensors[place] for place in places]
        counts = [tensor.dim() >= 2 or not matrices for tensor in members]
        found.append(kind(places, members, counts, size or 0))
    return found


class Unchanged:
    """Some tensors and a small copy of each: whether any has changed since `step`."""

    def __init__(self, tensors: Iterable[Tensor], step: int) -> None:
        self.step = step
        self._pairs = [(tensor, self._look(tensor)) for tensor in tensors]

    @staticmethod
    def _look(tensor: Tensor) -> Tensor:
        values = local(tensor)
        return torch.zeros(0) if values is None else sample_view(values, _UNCHANGED_SAMPLE).clone()

    def all(self) -> bool:
        """True while all of them are as they were. Reads the device: only under suspicion."""
        return all(torch.equal(self._look(tensor), copy) for tensor, copy in self._pairs)

    def on_device(self) -> Tensor:
        """The same as a boolean scalar that stays on the device."""
        flags = []
        for tensor, copy in self._pairs:
            now = self._look(tensor)
            flags.append((now == copy).all() if now.shape == copy.shape else copy.new_zeros((), dtype=torch.bool))
        return torch.stack([flag.to(flags[0].device) for flag in flags]).all()

    def one(self, tensor: Tensor) -> bool:
        """The same for one of them; False for a tensor that is not."""
        return any(own is tensor and torch.equal(self._look(tensor), copy) for own, copy in self._pairs)


def overall(vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Update-to-weight ratio over all that counts (NaN without any) and the largest change, as device scalars."""
    ends = [vector[-3:] for vector in vectors]
    if len(ends) == 1:
        moved, held, largest = ends[0].unbind()
        return moved / held, largest
    stacked = torch.stack([end.to(ends[0].device, torch.float32) for end in ends])
    moved, held = torch.linalg.vector_norm(stacked[:, :2], 2, 0)
    return moved / held, stacked[:, 2].amax()


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def local(tensor: Tensor) -> Tensor | None:
    """The part of a parameter that this process holds, as real floating-point values; None if it cannot be compared.

    A sharded tensor gives its shard, a complex one its pairs. Integer, quantized, sparse and meta tensors give None.
    """
    if is_freed(tensor):
        return None
    values = shard_of(tensor.detach())
    if values.layout is not torch.strided or values.is_meta or values.is_quantized or not values.numel():
        return None
    if values.is_complex():
        return torch.view_as_real(values)
    return values if values.is_floating_point() else None


def address(tensor: Tensor) -> tuple[int, int] | None:
    """Where the values of a tensor lie, and how many; None for what has no memory of its own yet, or is empty."""
    values = local(tensor)
    known = values is not None and values.numel() and values.data_ptr()
    return (values.data_ptr(), values.numel()) if values is not None and known else None


def _has_elements(tensor: Tensor) -> bool:
    """Whether this process holds any of it: the shard of a small tensor may be empty."""
    return bool(shard_of(tensor).numel())


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
