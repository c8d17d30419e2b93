"""Confirm a suspicion exactly: compare the suspects element by element over one step, beside their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.updates.param_sample import local

# 16 MB in float32: a second copy of a large model must not be what runs out of memory.
_MOST_ELEMENTS = 4_194_304


class Verdict(NamedTuple):
    """What one suspect did: counts of compared elements, and its mean absolute value."""

    compared: int
    changed: int
    with_grad: int
    moved_with_grad: int
    magnitude: float

    @property
    def kept(self) -> float:
        """Share of the elements with a non-zero gradient whose value stayed the same; 0 without any."""
        return 1.0 - self.moved_with_grad / self.with_grad if self.with_grad else 0.0


class Confirmation:
    """Copies of the suspects, taken before a step; at most 4 million elements, evenly spread where that is not all."""

    def __init__(self, suspects: Mapping[str, Tensor]) -> None:
        self.names = list(suspects)
        self._tensors = list(suspects.values())
        self._most = max(1, _MOST_ELEMENTS // max(1, len(suspects)))
        self._before = [self._spread(tensor).clone() for tensor in self._tensors]
        self._grads: list[Tensor | None] = []

    def take_grads(self) -> None:
        """Note which elements have a gradient; before the step, or after it where a closure made them."""
        self._grads = [self._has_grad(tensor) for tensor in self._tensors]

    def result(self) -> Tensor:
        """One float64 vector `[4 * n]` on the device: changed, with gradient, both, and the mean absolute value."""
        device = self._before[0].device
        parts = []
        for tensor, before, grads in zip(self._tensors, self._before, self._grads, strict=True):
            changed = self._spread(tensor) != before
            with_grad = torch.zeros_like(changed) if grads is None else grads
            counts = [changed.sum(), with_grad.sum(), (changed & with_grad).sum(), before.abs().double().mean()]
            parts += [count.to(device, torch.float64) for count in counts]
        return torch.stack(parts)

    def verdicts(self, numbers: list[float]) -> dict[str, Verdict]:
        """The result by name, once the host has read it."""
        found = {}
        for place, (name, before) in enumerate(zip(self.names, self._before, strict=True)):
            changed, with_grad, both, magnitude = numbers[4 * place : 4 * place + 4]
            found[name] = Verdict(before.numel(), int(changed), int(with_grad), int(both), magnitude)
        return found

    def release(self) -> None:
        """Drop the references to tensors; the sizes stay."""
        self._tensors, self._grads = [], []

    def _spread(self, tensor: Tensor) -> Tensor:
        values = local(tensor)
        flat = tensor.detach().new_zeros(0) if values is None else values.reshape(-1)
        stride = max(1, flat.numel() // self._most)
        # One more, and the stride no longer divides the row length: every column has its turn.
        return flat[:: stride + (stride > 1 and stride % 2 == 0)]

    def _has_grad(self, tensor: Tensor) -> Tensor | None:
        grad = tensor.grad
        if grad is None:
            return None
        return self._spread(grad.to_dense() if grad.layout is torch.sparse_coo else grad) != 0
