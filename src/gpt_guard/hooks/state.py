"""Parameters and float buffers as one fused norm, to notice the step after which one of them is non-finite."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.gradients import fused_norms
from gpt_guard.hooks.tensors import describe, looks_bad, readable, version_of, watchable
from gpt_guard.records import TensorStats


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
        self._after: dict[str, int] = {}
        self._after_last: dict[str, int] = {}
        self._before: dict[str, int] = {}

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
        for name, (owner, key) in self._buffers.items():
            tensor = owner.get(key)
            if tensor is not None and name not in left_out and tensor.is_floating_point():
                found[name] = tensor
        return found

    def norms(self) -> Tensor | None:
        """One norm per watched tensor, on the device; None if there is nothing to watch."""
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
        self._before = {name: version_of(parameter) for name, parameter in self._parameters.items()}

    def note_after(self) -> None:
        """Note the versions of the parameters just after a step; host work only."""
        self._after_last = self._after
        self._after = {name: version_of(parameter) for name, parameter in self._parameters.items()}

    def written_between(self, name: str) -> bool:
        """Whether something wrote to a parameter between the last two steps, outside of both."""
        return self._before.get(name) != self._after_last.get(name)

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
