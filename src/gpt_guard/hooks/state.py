"""Parameters and float buffers as one fused norm, to notice the step after which one of them is non-finite."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.gradients import fused_norms, ordinary
from gpt_guard.hooks.scratch import Scratch
from gpt_guard.hooks.tensors import describe, looks_bad, readable, version_of, watchable
from gpt_guard.records import TensorStats


class _Kept(NamedTuple):
    """Parameters that are watched, while so many names are left out; `alike` if one call reduces all of them."""

    left_out: int
    names: list[str]
    tensors: list[Tensor]
    alike: bool


class StateWatch:
    """The model's state: `norms` measures it on the device, `turned_bad` confirms exactly what the norms suggest.

    What is non-finite at the start (`settle`) is left out from then on: masks, and minima that begin at inf.
    """

    def __init__(self, model: nn.Module, *, parameters: bool, buffers: bool) -> None:
        self.left_out: set[str] = set()
        self.at_start: frozenset[str] = frozenset()
        self._parameters: dict[str, Tensor] = dict(model.named_parameters()) if parameters else {}
        # The owner's dict and key instead of the tensor: a forward may put a new tensor into a buffer.
        self._buffers: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        for path, module in model.named_modules():
            for key in module._buffers:
                self._buffers[f"{path}.{key}" if path else key] = (module._buffers, key)
        if not buffers:
            self.left_out |= set(self._buffers)
        self._measured: list[str] = []
        self._all = list(self._parameters.values())
        self._places = {name: place for place, name in enumerate(self._parameters)}
        self._after: list[int] = []
        self._after_last: list[int] = []
        self._before: list[int] = []
        self._kept = _Kept(-1, [], [], False)
        self._small = True
        self._scratch: Scratch | None = None

    def settle(self) -> dict[str, TensorStats]:
        """Describe what is non-finite now and leave it out from now on. Reads the device once per tensor."""
        found = {name: describe(tensor) for name, tensor in self._tensors().items()}
        bad = {name: stats for name, stats in found.items() if stats is not None}
        self.left_out |= set(bad)
        self.at_start = frozenset(bad)
        self.note_after()
        return bad

    def ignore(self, name: str) -> None:
        """Leave a parameter or buffer out that has been spoken of already."""
        self.left_out.add(name)

    def watches(self, name: str) -> bool:
        """Whether a parameter or buffer was finite when it was last measured."""
        return name not in self.left_out and (name in self._parameters or name in self._buffers)

    def _tensors(self) -> dict[str, Tensor]:
        left_out = self.left_out
        found = {name: tensor for name, tensor in self._parameters.items() if name not in left_out}
        found |= {name: tensor for name in self._buffers if (tensor := self._buffer(name)) is not None}
        return found

    def finite(self) -> bool:
        """True if everything watched is finite, by one sum over all of it; False if `norms` must tell. Reads.

        Only for a small model on the CPU, where norms of many tensors cost a call for each.
        """
        if not self._small:
            return False
        values = self._now_kept().tensors
        if self._buffers:
            values = values + [t for name in self._buffers if (t := self._buffer(name)) is not None]
        scratch = self._scratch
        if scratch is None or len(scratch) != len(values):
            if not Scratch.holds(values):
                self._small = False
                return False
            scratch = self._scratch = Scratch(values)
        try:
            total = scratch.total(values)
        except RuntimeError:
            # A tensor has another shape by now.
            self._scratch = None
            return False
        return total - total == 0.0

    def _now_kept(self) -> _Kept:
        """The parameters that are not left out, and facts about them."""
        if self._kept.left_out != len(self.left_out):
            kept = {name: tensor for name, tensor in self._parameters.items() if name not in self.left_out}
            values = list(kept.values())
            self._kept = _Kept(len(self.left_out), list(kept), values, ordinary(values) and all(map(_is_plain, values)))
            self._scratch = None
        return self._kept

    def _buffer(self, name: str) -> Tensor | None:
        owner, key = self._buffers[name]
        tensor = owner.get(key)
        return tensor if tensor is not None and name not in self.left_out and tensor.is_floating_point() else None

    def norms(self) -> Tensor | None:
        """One norm per watched tensor, on the device; None if there is nothing to watch."""
        kept = self._now_kept()
        if kept.alike and not self._buffers:
            self._measured = kept.names
            with torch.no_grad():
                return torch.stack(torch._foreach_norm(kept.tensors, 2.0))
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

    def turned_bad(self, norms: list[float]) -> dict[str, TensorStats]:
        """Which tensors are non-finite, given the norms the host has read; masks (-inf alone) are not."""
        if all(norm - norm == 0.0 for norm in norms):
            return {}
        tensors, bad = self._tensors(), {}
        for name, norm in zip(self._measured, norms, strict=True):
            if norm - norm != 0.0 and name in tensors and (stats := describe(tensors[name])) is not None:
                self.left_out.add(name)
                if not stats.only_neg_inf:
                    bad[name] = stats
        return bad

    def note_before(self) -> None:
        """Note the versions of the parameters just before a step; host work only."""
        self._before = self._versions()

    def note_after(self) -> None:
        """Note the versions of the parameters just after a step; host work only."""
        self._after_last, self._after = self._after, self._versions()

    def _versions(self) -> list[int]:
        try:
            return [parameter._version for parameter in self._all]
        except RuntimeError:
            return [version_of(parameter) for parameter in self._all]

    def written_between(self, name: str) -> bool:
        """Whether something wrote to a parameter between the last two steps, outside of both."""
        place = self._places.get(name)
        return place is not None and self._before[place : place + 1] != self._after_last[place : place + 1]

    def buffer_versions(self) -> dict[int, int]:
        """Identity and version of each float buffer now: a forward that writes to one changes either."""
        found = (owner.get(key) for owner, key in self._buffers.values())
        return {id(buffer): version_of(buffer) for buffer in found if buffer is not None and buffer.is_floating_point()}


class BadState(NamedTuple):
    """A parameter or buffer that is non-finite, under its full name."""

    name: str
    tensor: Tensor
    stats: TensorStats
    is_parameter: bool


def bad_state(module: nn.Module, path: str, untouched: dict[int, int]) -> BadState | None:
    """The first parameter or buffer in a module that holds NaN or +inf; -inf alone is a mask.

    A buffer counts only if this forward has not written to it (`untouched`: the versions when it began): running
    statistics and caches take in what went wrong elsewhere. Statistics that BatchNorm updates are not read while it
    trains. Reads every tensor exactly: only after a failure.
    """
    for name, parameter in module.named_parameters(prefix=path):
        if (stats := looks_bad(parameter)) is not None:
            return BadState(name, parameter, stats, True)
    for inner, owner in module.named_modules(prefix=path):
        for key, buffer in owner._buffers.items():
            if buffer is None or _updates(owner, key) or untouched.get(id(buffer)) != version_of(buffer):
                continue
            if (stats := looks_bad(buffer)) is not None:
                return BadState(f"{inner}.{key}" if inner else key, buffer, stats, False)
    return None


def _updates(owner: nn.Module, key: str) -> bool:
    statistics = isinstance(owner, nn.modules.batchnorm._NormBase) and key.startswith("running_")
    return statistics and owner.training


def _is_plain(tensor: Tensor) -> bool:
    usual = type(tensor) is nn.Parameter or type(tensor) is Tensor
    return usual and tensor.layout is torch.strided and tensor.dtype in _WIDE and tensor.numel() > 0


_WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
