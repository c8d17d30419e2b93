"""What one optimizer holds, by name, and how its step is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.param_sample import Change, local, samplers
from gpt_guard.hooks.watch import Watch

_NAMED = 5


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

    `names`, `tensors`, `groups` (index of the param group), `own` (the model holds it) and `frozen` run in parallel;
    `left_out` names tensors that cannot be compared.
    """

    def __init__(self, watch: Watch, index: int, size: int | None) -> None:
        optimizer = watch.optimizers[index]
        everything = held(watch, index)
        model = {id(parameter) for parameter in watch.model.parameters()}
        group_of = {id(t): place for place, group in enumerate(optimizer.param_groups) for t in group["params"]}
        values = {name: local(tensor) for name, tensor in everything.items()}
        self.names = [name for name, value in values.items() if value is not None]
        self.left_out = [name for name, value in values.items() if value is None and everything[name].numel()]
        self.tensors = [everything[name] for name in self.names]
        self.groups = [group_of[id(tensor)] for tensor in self.tensors]
        self.own = [id(tensor) in model for tensor in self.tensors]
        self.trains = [tensor.requires_grad for tensor in self.tensors]
        self.half = any(tensor.dtype.itemsize < torch.float32.itemsize for tensor in self.tensors)
        self._ids = _ids(optimizer)
        self._plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in self.tensors)
        self._pointers = self._addresses()
        self._samplers = samplers([value for value in values.values() if value is not None], size)

    def outdated(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds other tensors by now, or one has other storage or was frozen; no device work."""
        return (
            _ids(optimizer) != self._ids
            or self._addresses() != self._pointers
            or [tensor.requires_grad for tensor in self.tensors] != self.trains
        )

    def take(self) -> None:
        """Remember the values before the step."""
        for sampler in self._samplers:
            sampler.take()

    def change(self) -> list[Change]:
        """What the step did. Empty if the step gave tensors another dtype or shape, which leaves nothing to compare."""
        addresses = self._addresses()
        if addresses != self._pointers:
            # An optimizer that assigns `p.data = ...` leaves our views on the old storage.
            values = [local(tensor) for tensor in self.tensors]
            self._pointers = addresses
            if not all(sampler.rebind(values) for sampler in self._samplers):
                self._ids = []
                return []
        return [sampler.change() for sampler in self._samplers]

    def _addresses(self) -> list[int]:
        if self._plain:
            return [tensor.data_ptr() for tensor in self.tensors]
        values = [local(tensor) for tensor in self.tensors]
        return [-1 if value is None else value.data_ptr() for value in values]


def _ids(optimizer: Optimizer) -> list[int]:
    return [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]


def unpack(changes: Sequence[Change], vectors: Sequence[Sequence[float]], count: int) -> list[list[float]]:
    """Shares, norms of the change and norms of the values before, each in the order of the plan's names."""
    columns = [[0.0] * count for _ in range(3)]
    for change, vector in zip(changes, vectors, strict=True):
        width = len(change.places)
        if width == count:
            return [list(vector[:width]), list(vector[width : 2 * width]), list(vector[2 * width :])]
        for column in range(3):
            for place, value in zip(change.places, vector[column * width : (column + 1) * width], strict=True):
                columns[column][place] = value
    return columns
