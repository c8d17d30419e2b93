"""Parameters and float buffers: which of them are non-finite, told from one fused norm, and who wrote to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.gradients import fused_norms, norms_of, ordinary
from gpt_guard.hooks.tensors import describe, looks_bad, readable, version_of, watchable
from gpt_guard.records import TensorStats

_WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Where readings wait, a step is judged when the next one of its optimizer has begun.
_KEPT = 8
_VERSION = attrgetter("_version")
StepNumber = tuple[int, int]
"""Number of the optimizer, and of its step."""


class _Kept(NamedTuple):
    """Parameters that are watched, while so many names are left out; `alike` if one call reduces all of them."""

    left_out: int
    names: list[str]
    tensors: list[Tensor]
    alike: bool


class KnownState(NamedTuple):
    """Ids of tensors that were bad when the watch began.

    `masks` are those that were -inf and otherwise finite, `harmless` all of them, once a step has gone well with them.
    """

    masks: frozenset[int] = frozenset()
    harmless: frozenset[int] = frozenset()


_NOTHING = KnownState()


class StateWatch:
    """The model's state: `norms` measures it on the device, `turned_bad` confirms exactly what the norms suggest.

    What is non-finite at the start (`settle`) is left out from then on: masks, and minima that begin at inf. `known`
    holds what was so then; `told` what has been spoken of since.
    """

    def __init__(self, model: nn.Module, *, parameters: bool, buffers: bool) -> None:
        self.left_out: set[str] = set()
        self.at_start: frozenset[str] = frozenset()
        self.known = KnownState()
        self.told: set[str] = set()
        self._shapes: dict[str, torch.Size] = {}
        self._watched = parameters, buffers
        self._list(model)
        self._measured: list[str] = []
        self._kept = _Kept(-1, [], [], False)

    def _list(self, model: nn.Module) -> None:
        parameters, buffers = self._watched
        self._parameters: dict[str, Tensor] = dict(model.named_parameters()) if parameters else {}
        # The owner's dict and key instead of the tensor: a forward may put a new tensor into a buffer.
        self._buffers: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        for path, module in model.named_modules():
            # A scripted module has no dict of its own for them, and never exchanges one.
            owner = module._buffers if isinstance(module._buffers, dict) else dict(module.named_buffers(recurse=False))
            for key in owner:
                self._buffers[f"{path}.{key}" if path else key] = (owner, key)
        if not buffers:
            self.left_out |= set(self._buffers)

    def renew(self, model: nn.Module) -> None:
        """Go on with the parameters and buffers that the model has now; new ones that are bad were so at the start."""
        parameters, buffers = self._parameters, self._buffers
        left_out, at_start, known, told, shapes = self.left_out, self.at_start, self.known, self.told, self._shapes
        self._list(model)
        same = {name for name, tensor in self._parameters.items() if parameters.get(name) is tensor}
        # A forward may put a new tensor into a buffer: it is still the same one of its owner.
        same |= {name for name, (owner, _) in self._buffers.items() if name in buffers and buffers[name][0] is owner}
        self.left_out = same | (set() if self._watched[1] else set(self._buffers))
        self._kept = _Kept(-1, [], [], False)
        self.settle()
        self.left_out = (self.left_out - same) | (left_out & same)
        self.at_start |= at_start & same
        self.known = KnownState(self.known.masks | known.masks, known.harmless)
        self.told = told & same
        self._shapes = {**self._shapes, **{name: shape for name, shape in shapes.items() if name in same}}
        self._kept = _Kept(-1, [], [], False)

    def settle(self) -> dict[str, TensorStats]:
        """Describe what is non-finite now and leave it out from now on; one fused norm, exact only after that."""
        tensors = self._tensors()
        norms = self.read()
        suspects = [name for name, norm in zip(self._measured, norms, strict=True) if norm - norm != 0.0]
        bad = {name: stats for name in suspects if (stats := describe(tensors[name])) is not None}
        self.left_out |= set(bad)
        self.at_start = frozenset(bad)
        self.known = KnownState(frozenset(id(tensors[name]) for name, stats in bad.items() if stats.only_neg_inf))
        self._shapes = {name: tensor.shape for name, tensor in tensors.items() if name in self._buffers}
        return bad

    def ignore(self, name: str) -> None:
        """Leave a parameter or buffer out that has been spoken of already."""
        self.left_out.add(name)
        self.told.add(name)

    def settled_late(self) -> dict[str, TensorStats]:
        """Parameters that were bad at the start: watch those that are finite by now, describe those that are not."""
        bad: dict[str, TensorStats] = {}
        for name in [name for name in self._parameters if name in self.at_start]:
            stats = describe(self._parameters[name])
            if stats is None:
                self._watch_again({name})
                self.at_start -= {name}
            elif not stats.only_neg_inf:
                bad[name] = stats
        return bad

    def recover(self) -> None:
        """Watch again what was spoken of and is finite by now: a checkpoint was loaded. Reads one tensor if it is not.

        For runs that go on after a finding; nothing is read before there is one.
        """
        names = [name for name in self._parameters if name in self.told]
        if names and describe(self._parameters[names[0]]) is None:
            finite = {name for name in names if describe(self._parameters[name]) is None}
            self.told -= finite
            self._watch_again(finite)

    def _watch_again(self, names: set[str]) -> None:
        self.left_out -= names
        self._kept = _Kept(-1, [], [], False)

    def watches(self, name: str) -> bool:
        """Whether a parameter or buffer was finite when it was last measured."""
        return name not in self.left_out and (name in self._parameters or name in self._buffers)

    def _tensors(self) -> dict[str, Tensor]:
        left_out = self.left_out
        found = {name: tensor for name, tensor in self._parameters.items() if name not in left_out}
        found |= {name: tensor for name in self._buffers if (tensor := self._buffer(name)) is not None}
        return found

    def _now_kept(self) -> _Kept:
        """The parameters that are not left out, and facts about them."""
        if self._kept.left_out != len(self.left_out):
            kept = {name: tensor for name, tensor in self._parameters.items() if name not in self.left_out}
            values = list(kept.values())
            self._kept = _Kept(len(self.left_out), list(kept), values, ordinary(values) and all(map(_is_plain, values)))
        return self._kept

    def _buffer(self, name: str) -> Tensor | None:
        owner, key = self._buffers[name]
        tensor = owner.get(key)
        return tensor if tensor is not None and name not in self.left_out and tensor.is_floating_point() else None

    def norms(self) -> Tensor | None:
        """One norm per watched tensor, on the device; None if there is nothing to watch."""
        found = self._norms()
        return torch.stack(found) if isinstance(found, tuple) else found

    def read(self) -> list[float]:
        """The same where reading is free: one number after the other costs less there than joining them first."""
        found = self._norms()
        if found is None:
            return []
        return [norm.item() for norm in found] if isinstance(found, tuple) else found.tolist()

    def _norms(self) -> Tensor | tuple[Tensor, ...] | None:
        kept = self._now_kept()
        if kept.alike and not self._buffers:
            self._measured = kept.names
            return norms_of(kept.tensors)
        values: list[Tensor] = []
        self._measured = []
        for name, tensor in self._tensors().items():
            # An ordinary tensor goes in as it is: `readable` costs more than its share of the norm.
            plain = tensor if _is_plain(tensor) else None
            if plain is None and watchable(tensor):
                plain = readable(tensor)
            if plain is not None:
                values.append(plain)
                self._measured.append(name)
        return fused_norms(values) if values else None

    def turned_bad(self, norms: list[float], spared: Callable[[str], bool] | None = None) -> dict[str, TensorStats]:
        """Which tensors are non-finite, given the norms the host has read; a buffer that became a mask is not.

        Those that are `spared` are left for somebody else to find.
        """
        # A NaN or an infinity survives the sum; x - x is 0 for any other number.
        total = sum(norms)
        if total - total == 0.0:
            return {}
        tensors, bad = self._tensors(), {}
        for name, norm in zip(self._measured, norms, strict=True):
            if norm - norm == 0.0 or name not in tensors or (spared is not None and spared(name)):
                continue
            if (stats := describe(tensors[name])) is not None:
                self.left_out.add(name)
                if not (stats.only_neg_inf and self._may_be_mask(name, stats)):
                    self.told.add(name)
                    bad[name] = stats
        return bad

    def went_well(self) -> None:
        """A step was made with what was bad at the start: it is not what goes wrong later."""
        if self.at_start and not self.known.harmless:
            tensors = {**self._parameters, **{name: owner.get(key) for name, (owner, key) in self._buffers.items()}}
            self.known = KnownState(self.known.masks, frozenset(id(tensors[name]) for name in self.at_start))

    def newly_bad(self) -> list[BadState]:
        """Which tensors have become non-finite since they were last measured; reads the device."""
        tensors = self._tensors()
        bad = self.turned_bad(self.read())
        return [BadState(name, tensors[name], stats, name in self._parameters) for name, stats in bad.items()]

    def _may_be_mask(self, name: str, stats: TensorStats) -> bool:
        """Whether -inf may stand there on purpose, as it never does in what is trained or in running statistics.

        A mask holds 0 beside it; tables with a mask in them (ALiBi) are built anew, in another shape, as they grow.
        """
        if name in self._parameters:
            return not self._parameters[name].requires_grad and _mask_like(stats)
        owner, key = self._buffers[name]
        if key.startswith("running_") and "num_batches_tracked" in owner:
            return False
        return _mask_like(stats) or self._shapes.get(name) != stats.shape

    def buffer_versions(self) -> dict[int, int]:
        """Identity and version of each float buffer now: a forward that writes to one changes either."""
        if not self._buffers:
            return {}
        found = (owner.get(key) for owner, key in self._buffers.values())
        return {id(buffer): version_of(buffer) for buffer in found if buffer is not None and buffer.is_floating_point()}


class BadState(NamedTuple):
    """A parameter or buffer that is non-finite, under its full name."""

    name: str
    tensor: Tensor
    stats: TensorStats
    is_parameter: bool


def bad_state(
    module: nn.Module,
    path: str,
    untouched: dict[int, int],
    known: KnownState = _NOTHING,
) -> BadState | None:
    """The first parameter or buffer in a module that holds NaN or +inf.

    -inf alone is a mask, except in running statistics and in trainable parameters that were none at the start.
    A buffer counts only if this forward has not written to it (`untouched`: the versions when it began): running
    statistics and caches take in what went wrong elsewhere. Statistics that BatchNorm updates are not read while it
    trains. Of what was bad in steps that went well, a layer of torch's own may use another part now; where code of the
    user's decides what is used, it was not this. Reads every tensor exactly: only after a failure.
    """
    layer = next(module.children(), None) is None and type(module).__module__.startswith("torch.nn.")
    harmless = frozenset() if layer else known.harmless
    for name, parameter in module.named_parameters(prefix=path):
        if id(parameter) in harmless:
            continue
        stats = describe(parameter)
        if stats is None or (stats.only_neg_inf and (id(parameter) in known.masks or not parameter.requires_grad)):
            continue
        return BadState(name, parameter, stats, True)
    for inner, owner in module.named_modules(prefix=path):
        for key, buffer in owner._buffers.items():
            if buffer is None or id(buffer) in harmless or _updates(owner, key):
                continue
            if untouched.get(id(buffer)) != version_of(buffer):
                continue
            stats = describe(buffer) if _is_statistics(owner, key) else looks_bad(buffer)
            if stats is not None:
                return BadState(f"{inner}.{key}" if inner else key, buffer, stats, False)
    return None


def _is_statistics(owner: nn.Module, key: str) -> bool:
    return isinstance(owner, nn.modules.batchnorm._NormBase) and key.startswith("running_")


def _updates(owner: nn.Module, key: str) -> bool:
    return _is_statistics(owner, key) and owner.training


def _mask_like(stats: TensorStats) -> bool:
    return not stats.finite_min and not stats.finite_max


def _is_plain(tensor: Tensor) -> bool:
    usual = type(tensor) is nn.Parameter or type(tensor) is Tensor
    return usual and tensor.layout is torch.strided and tensor.dtype in _WIDE and tensor.numel() > 0


class ParameterVersions:
    """How often each parameter was written to, before and after each of the newest steps.

    Host work only. A write through `.data` or numpy is not counted by torch, and not seen here.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._take(parameters)
        self._after = self._now()
        # Of the newest steps: which it was, the counters before it, and those that the one before had left.
        self._steps: deque[tuple[StepNumber, list[int], list[int]]] = deque(maxlen=_KEPT)

    def _take(self, parameters: Mapping[str, Tensor]) -> None:
        self._tensors = list(parameters.values())
        self._places = {name: place for place, name in enumerate(parameters)}

    def renew(self, parameters: Mapping[str, Tensor]) -> None:
        """Go on with other parameters; of new ones nothing is known before now."""
        places = {id(tensor): place for place, tensor in enumerate(self._tensors)}
        self._take(parameters)
        moved, now = [places.get(id(tensor)) for tensor in self._tensors], self._now()

        def carried(old: list[int]) -> list[int]:
            return [new if place is None else old[place] for place, new in zip(moved, now, strict=True)]

        self._after = carried(self._after)
        kept = [(step, carried(before), carried(last)) for step, before, last in self._steps]
        self._steps.clear()
        self._steps.extend(kept)

    def _now(self) -> list[int]:
        try:
            return list(map(_VERSION, self._tensors))
        except RuntimeError:
            # Inference tensors do not count.
            return [version_of(tensor) for tensor in self._tensors]

    def step_begins(self, step: StepNumber) -> None:
        """Note the counters before a step."""
        self._steps.append((step, self._now(), self._after))

    def step_ended(self) -> None:
        """Note the counters that the step has left."""
        self._after = self._now()

    def written_between(self, name: str, step: StepNumber) -> bool:
        """Whether something wrote to a parameter between this step and the one before it; False if not known."""
        place = self._places.get(name)
        if place is None:
            return False
        return any(before[place] != last[place] for each, before, last in self._steps if each == step)
