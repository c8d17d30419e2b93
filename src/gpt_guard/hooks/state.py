"""Parameters and float buffers as one fused norm, to notice the step after which one of them is non-finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_guard.hooks.gradients import fused_norms
from gpt_guard.hooks.tensors import describe, readable, watchable
from gpt_guard.records import TensorStats


class StateWatch:
    """The model's state: `norms` measures it on the device, `turned_bad` confirms exactly what the norms suggest.

    What is non-finite at the start (`settle`) is left out from then on: masks, and minima that begin at inf.
    """

    def __init__(self, model: nn.Module, *, parameters: bool, buffers: bool) -> None:
        self._left_out: set[str] = set()
        self._parameters = dict(model.named_parameters()) if parameters else {}
        # The owner's dict and key instead of the tensor: a forward may put a new tensor into a buffer.
        self._buffers: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        for path, module in model.named_modules() if buffers else ():
            for key in module._buffers:
                self._buffers[f"{path}.{key}" if path else key] = (module._buffers, key)
        self._measured: list[str] = []

    def settle(self) -> dict[str, TensorStats]:
        """Describe what is non-finite now and leave it out from now on. Reads the device once per tensor."""
        found = {name: describe(tensor) for name, tensor in self._tensors().items()}
        bad = {name: stats for name, stats in found.items() if stats is not None}
        self._left_out |= set(bad)
        return bad

    def ignore(self, name: str) -> None:
        """Leave a parameter or buffer out that has been spoken of already."""
        self._left_out.add(name)

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if name not in self._left_out:
                found[name] = parameter
        for name, (owner, key) in self._buffers.items():
            tensor = owner.get(key)
            if tensor is not None and name not in self._left_out and tensor.is_floating_point():
                found[name] = tensor
        return found

    def norms(self) -> Tensor | None:
        """One norm per watched tensor, on the device; None if there is nothing to watch."""
        tensors = self._tensors()
        values: list[Tensor] = []
        self._measured = []
        for name, tensor in tensors.items():
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
            if norm - norm == 0.0 or name not in tensors:
                continue
            if (stats := describe(tensors[name])) is not None:
                self._left_out.add(name)
                if not stats.only_neg_inf:
                    bad[name] = stats
        return bad


def _is_plain(tensor: Tensor) -> bool:
    usual = type(tensor) is nn.Parameter or type(tensor) is Tensor
    return usual and tensor.layout is torch.strided and tensor.dtype in _WIDE and tensor.numel() > 0


_WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
