"""What one optimizer holds, by name, and how its step is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.param_sample import Change, local, samplers
from gpt_guard.hooks.watch import Watch

_NAMED = 5
_REQUIRES_GRAD = attrgetter("requires_grad")


def listed(names: Iterable[str], most: int = _NAMED) -> str:
    """Names in backquotes, the first few of them and how many more there are."""
    known = list(names)
    shown = ", ".join(f"`{name}`" for name in known[:most])
    return shown if len(known) <= most else f"{shown} and {len(known) - most} more"


def held(watch: Watch, index: int) -> dict[str, Tensor]:
    """What optimizer `index` holds now, by name.

    Unlike `watch.held_by` this knows parameters that were added or replaced since entry; it walks the model.
    """
    names = {id(parameter): name for name, parameter in watch.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for group, entries in enumerate(watch.optimizers[index].param_groups):
        for place, tensor in enumerate(entries["params"]):
            made_up = f"optimizer[{index}].param_groups[{group}][{place}]"
            found[names.get(id(tensor)) or watch.name_of(tensor) or made_up] = tensor
    return found


class Plan:
    """The measured tensors of one optimizer, in order, and facts about them that only change when the plan does.

    `names`, `tensors`, `groups` (index of the param group), `own` (the model holds it), `trains` and `half` run in
    parallel; `left_out` names tensors that cannot be compared.
    """

    def __init__(self, watch: Watch, index: int, size: int | None) -> None:
        optimizer = watch.optimizers[index]
        everything = held(watch, index)
        model = {id(parameter) for parameter in watch.model.parameters()}
        group_of = {id(t): place for place, group in enumerate(optimizer.param_groups) for t in group["params"]}
        values = {name: local(tensor) for name, tensor in everything.items()}
        self.names = [name for name, value in values.items() if value is not None]
        self.left_out = [name for name, value in values.items() if value is None and _has_elements(everything[name])]
        self.tensors = [everything[name] for name in self.names]
        self.groups = [group_of[id(tensor)] for tensor in self.tensors]
        self.own = [id(tensor) in model for tensor in self.tensors]
        self.trains = [tensor.requires_grad for tensor in self.tensors]
        self.half = [tensor.dtype.itemsize < torch.float32.itemsize for tensor in self.tensors]
        self.weights = sum(tensor.numel() for tensor in self.tensors if tensor.dim() >= 2)
        self.any_half = any(self.half)
        self.any_frozen = not all(self.trains)
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._spoilt = False
        # torch's own optimizers write in place; one written by hand may assign `p.data = ...` within step().
        self._in_place = type(optimizer).__module__.startswith("torch.optim.")
        self._plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in self.tensors)
        self._pointers = self._addresses()
        measured = [value for value in values.values() if value is not None]
        self._samplers = samplers(measured, size, immediate=watch.immediate)

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
        """Remember the values before the step."""
        for sampler in self._samplers:
            sampler.take()

    def change(self) -> list[Change]:
        """What the step did. Empty if the step gave tensors another dtype or shape, which leaves nothing to compare."""
        addresses = self._pointers if self._in_place else self._addresses()
        if addresses != self._pointers:
            # Our views are on the old storage.
            values = [local(tensor) for tensor in self.tensors]
            self._pointers = addresses
            if not all(sampler.rebind(values) for sampler in self._samplers):
                self._spoilt = True
                return []
        return [sampler.change() for sampler in self._samplers]

    def _addresses(self) -> list[int]:
        if self._plain:
            return list(map(Tensor.data_ptr, self.tensors))
        values = [local(tensor) for tensor in self.tensors]
        return [-1 if value is None else value.data_ptr() for value in values]


def _has_elements(tensor: Tensor) -> bool:
    """Whether this process holds any of it: the shard of a small tensor may be empty."""
    values = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(values.numel())


class Columns:
    """The measurements of one step on the host, in the order of the plan's names, unpacked only when asked for.

    `norm` is that of the change; `share` the share of elements that changed, known for half types only and elsewhere
    the same as `norm`: there it only matters whether it is zero. `ratio` is the overall update-to-weight ratio, NaN
    where nothing counts, `held` the norm of what counts before the step; `largest` the largest absolute change.
    """

    def __init__(self, changes: Sequence[Change], vectors: Sequence[list[float]], count: int) -> None:
        self._groups = [(change.places, vector) for change, vector in zip(changes, vectors, strict=True)]
        self._count = count
        if len(vectors) == 1:
            # The usual case, a step of one dtype on one device: nothing to join.
            moved, self.held, self.largest = vectors[0][-3:]
        else:
            moved = math.hypot(*[vector[-3] for vector in vectors])
            self.held = math.hypot(*[vector[-2] for vector in vectors])
            self.largest = max([vector[-1] for vector in vectors])
        self.norm = self._column(0)
        halves = any(_has_share(places, vector) for places, vector in self._groups)
        self.share = self._column(2) if halves else self.norm
        self.ratio = moved / self.held if self.held > 0.0 else math.nan

    def _column(self, number: int) -> list[float]:
        if len(self._groups) == 1:
            start = number * self._count
            return self._groups[0][1][start : start + self._count]
        column = [0.0] * self._count
        for places, vector in self._groups:
            # A group without shares answers with its norms.
            start = len(places) * (number if number < 2 or _has_share(places, vector) else 0)
            for place, value in zip(places, vector[start : start + len(places)], strict=True):
                column[place] = value
        return column

    def ratios(self) -> list[float]:
        """The ratio of each name; infinite for what was zero before and moved."""
        rows = zip(self.norm, self._column(1), strict=True)
        return [norm / weight if weight > 0.0 else math.inf if norm else 0.0 for norm, weight in rows]


def _has_share(places: list[int], vector: list[float]) -> bool:
    return len(vector) > 2 * len(places) + 3
