"""What one optimizer holds, by name, and how its step is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.param_columns import Columns, join
from gpt_guard.callbacks.updates.param_rows import HostRows
from gpt_guard.callbacks.updates.param_sample import Change, Full, Rows, local
from gpt_guard.hooks.watch import Watch

_NAMED = 5
_REQUIRES_GRAD = attrgetter("requires_grad")
_VERSION = attrgetter("_version")
Sampler = Rows | Full | HostRows


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


def samplers(tensors: Sequence[Tensor], size: int | None, *, host: bool) -> list[Sampler]:
    """One sampler for each device and dtype; `size` None measures all elements, `host` gives figures at once."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    matrices = any(tensor.dim() >= 2 for tensor in tensors)
    found: list[Sampler] = []
    for places in groups.values():
        members = [tensors[place] for place in places]
        counts = [bool(tensor.dim() >= 2 or not matrices) for tensor in members]
        if size is None:
            found.append(Full(places, members, counts))
        else:
            found.append((HostRows if host else Rows)(places, members, counts, size))
    return found


class Plan:
    """The measured tensors of one optimizer, in order, and facts about them that only change when the plan does.

    `names`, `tensors`, `groups` (index of the param group), `own` (the model holds it), `trains` and `half` run in
    parallel; `left_out` names tensors that cannot be compared. `host` tells whether the figures come as floats at once,
    `keeps` whether the values after a step may serve before the next, where no version counter has moved in between,
    `kept` whether those of the current step will, `known` whether those of the last one did.
    """

    def __init__(self, watch: Watch, index: int, size: int | None) -> None:
        self.index = index
        self.optimizer = optimizer = watch.optimizers[index]
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
        self._lists = [group["params"] for group in optimizer.param_groups]
        self._members = [list(params) for params in self._lists]
        self._spoilt = False
        # torch's own optimizers write in place; one written by hand may assign `p.data = ...` within step().
        self._in_place = type(optimizer).__module__.startswith("torch.optim.")
        self._plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in self.tensors)
        self._pointers = self._addresses()
        measured = [value for value in values.values() if value is not None]
        on_host = watch.immediate and all(value.device.type == "cpu" for value in measured)
        self._samplers = samplers(measured, size, host=on_host)
        self._host = [sampler for sampler in self._samplers if isinstance(sampler, HostRows)]
        self._device = [sampler for sampler in self._samplers if not isinstance(sampler, HostRows)]
        self.host = not self._device
        # A frozen tensor that seemed to move because of a write that no counter shows would be a false alarm.
        counted = not any(tensor.is_inference() for tensor in self.tensors)
        self.keeps = self.host and self._plain and counted and not self.any_frozen
        self.kept = self.known = False
        self._versions: list[int] | None = None
        # Noted once for all who ask, where the optimizer holds what the model does, in its order.
        alike = len(self.tensors) == len(watch.versions.tensors) and all(map(is_, self.tensors, watch.versions.tensors))
        self._noted = watch.versions if alike else None

    def outdated(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds other tensors by now, or one has other storage or was frozen; no device work."""
        groups = optimizer.param_groups
        if self._spoilt or len(groups) != len(self._members):
            return True
        for group, members in zip(groups, self._members, strict=True):
            params = group["params"]
            if len(params) != len(members) or not all(map(is_, params, members)):
                return True
        self._lists = [group["params"] for group in groups]
        return self._addresses() != self._pointers or list(map(_REQUIRES_GRAD, self.tensors)) != self.trains

    def alike(self, optimizer: Optimizer) -> bool:
        """A quick look in place of `outdated`, for light steps: the lists are the same and as long as they were.

        What it misses is harmless until the next full step: a tensor with other storage seems to stand still, and
        `strayed` tells; one that was frozen has stood still as well, or moves on.
        """
        groups = optimizer.param_groups
        if self._spoilt or not self.keeps or len(groups) != len(self._lists):
            return False
        for group, known, members in zip(groups, self._lists, self._members, strict=True):
            params = group["params"]
            if params is not known or len(params) != len(members):
                return False
            if members and (params[0] is not members[0] or params[-1] is not members[-1]):
                return False
        return True

    def unwritten(self) -> bool:
        """Whether no version counter has moved since the last step: then the values are those that it left."""
        if self.keeps:
            now = list(map(_VERSION, self.tensors)) if self._noted is None else self._noted.before
            self.kept = self.known = now == self._versions
        else:
            self.kept = self.known = False
        return self.known

    def take(self, *, known: bool, full: bool) -> bool:
        """Remember the values before the step; False if they are others than those that are `known`.

        Where something writes to them between two steps it mostly does so always: then only a full step has the
        values after it kept, to see whether it still is so.
        """
        self.kept = self.keeps and full
        honest = True
        for sampler in self._samplers:
            honest &= sampler.take(known=known)
        return honest

    def change(self) -> list[Change]:
        """What the step did, on the device. Empty if it left nothing to compare with: another dtype or shape."""
        return [sampler.change() for sampler in self._device] if self._bound() else []

    def note(self, *, later: bool) -> bool:
        """Remember the values after the step, where `host` is True; False if there is nothing to compare with."""
        if self._spoilt or not (self._in_place or self._bound()):
            return False
        for sampler in self._host:
            sampler.note(later=later)
        if not self.kept:
            self._versions = None
        else:
            self._versions = list(map(_VERSION, self.tensors)) if self._noted is None else self._noted.after
        return True

    def figures(self, waiting: int) -> list[Columns | None]:
        """What each of the last noted steps did, in order; None where a tensor had left for other storage by then."""
        parts = [(sampler.places, sampler.figures(waiting, keep=self.kept)) for sampler in self._host]
        if len(parts) == 1:
            # The usual case, tensors of one dtype on one device: nothing to join.
            steps = parts[0][1]
        else:
            steps = [join([(places, each[step]) for places, each in parts]) for step in range(waiting)]
        return [None if columns.least == 0.0 and self._strayed(columns) else columns for columns in steps]

    def _bound(self) -> bool:
        """Have the samples look at the tensors' storage; False if a tensor is laid out in another way by now."""
        addresses = self._pointers if self._in_place else self._addresses()
        if addresses != self._pointers:
            # Our views are on the old storage.
            values = [local(tensor) for tensor in self.tensors]
            self._pointers = addresses
            self._spoilt = not all(sampler.rebind(values) for sampler in self._samplers)
        return not self._spoilt

    def _strayed(self, columns: Columns) -> bool:
        """Whether a tensor that seems to stand still has other storage by now, in which it may well move."""
        if self.keeps:
            still = [place for place, share in enumerate(columns.share) if share == 0.0]
            self._spoilt |= any(self.tensors[place].data_ptr() != self._pointers[place] for place in still)
        return self._spoilt

    def _addresses(self) -> list[int]:
        if self._plain:
            return list(map(Tensor.data_ptr, self.tensors))
        values = [local(tensor) for tensor in self.tensors]
        return [-1 if value is None else value.data_ptr() for value in values]


def _has_elements(tensor: Tensor) -> bool:
    """Whether this process holds any of it: the shard of a small tensor may be empty."""
    values = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(values.numel())
