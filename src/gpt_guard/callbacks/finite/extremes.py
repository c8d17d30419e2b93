"""Smallest, largest and root mean square value of what each module returns in a step, left on the device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.copies import Uncopiable
from gpt_guard.hooks.forward import ForwardTap
from gpt_guard.hooks.hook import Hook
from gpt_guard.hooks.tensors import readable, walk, watchable


class Measured(NamedTuple):
    """The modules that were measured, by index, with the dtype of their outputs, and a tensor of shape `[modules, 3]`.

    Its columns are minimum, maximum and root mean square, over all outputs and calls of the step.
    """

    modules: list[int]
    dtypes: list[torch.dtype]
    values: Tensor


class Extremes:
    """Hooks on every module that a tap watches; two reading passes over each output, none of them read by the host."""

    def __init__(self, tap: ForwardTap) -> None:
        self._tap = tap
        self._handles: list[Any] = []
        self._found: dict[int, tuple[torch.dtype, Tensor]] = {}

    def open(self) -> None:
        """Begin to measure."""
        for index, module in enumerate(self._tap.modules):
            hook = _Look(self._tap, index, module, self)
            self._handles.append(Uncopiable(module.register_forward_hook(hook)))

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        while self._handles:
            self._handles.pop().remove()
        self._found.clear()

    @torch.no_grad()
    def note(self, index: int, output: Any) -> None:
        """Measure the floating-point tensors of one output; not in a forward without gradients."""
        for _, tensor in walk(output):
            values = readable(tensor) if watchable(tensor) else None
            if values is None:
                continue
            wide = values.dtype if values.dtype is torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(values, dtype=wide) / math.sqrt(values.numel())
            low, high = torch.aminmax(values)
            row = torch.stack([low.to(wide), high.to(wide), norm])
            before = self._found.get(index)
            if before is not None:
                row = torch.cat([torch.minimum(row[:1], before[1][:1]), torch.maximum(row[1:], before[1][1:])])
            self._found[index] = (values.dtype, row)

    def take(self) -> Measured | None:
        """What the step has brought; None for nothing. Reads nothing."""
        found, self._found = self._found, {}
        if not found:
            return None
        rows = [row for _, row in found.values()]
        device = rows[0].device
        stacked = torch.stack(
            [row.to(device, torch.float64 if device.type == "cpu" else torch.float32) for row in rows]
        )
        return Measured(list(found), [dtype for dtype, _ in found.values()], stacked)


class _Look(Hook):
    def __init__(self, tap: ForwardTap, index: int, module: nn.Module, extremes: Extremes) -> None:
        super().__init__(tap, index, module)
        self._extremes = extremes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.active(module) and torch.is_grad_enabled():
            self._extremes.note(self.index, output)
