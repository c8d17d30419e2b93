"""Gradient norms, measured once per moment however many guards ask, and only if the gradients have changed since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.tensors import readable

_HALF = (torch.float16, torch.bfloat16)


class GradNorms(NamedTuple):
    """L2 norms of the gradients that exist: names, and norms as floats (CPU) or as one device tensor `[n]`."""

    names: list[str]
    norms: Any


class Gradients:
    """The gradients of a fixed list of parameters: whether they changed, and their L2 norms.

    Changes are noticed by identity and version counter, which costs no device work. Norms are one fused call over all
    gradients; they stay on the device until the ledger reads them.
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self._mark: list[tuple[int, int]] = []

    def current(self) -> list[Tensor | None]:
        """The gradients now, None where there is none."""
        return [parameter.grad for parameter in self.parameters]

    def mark(self) -> bool:
        """Remember the state of all gradients; True if no parameter has one, as after `zero_grad()`."""
        self._mark = _state(self.parameters)
        return not any(version >= 0 for _, version in self._mark)

    def touched(self) -> bool:
        """Whether any gradient has been replaced or written since `mark`."""
        return _state(self.parameters) != self._mark

    def measure(self, unit: Tensor | float | None, *, immediate: bool) -> GradNorms:
        """Norms of all gradients now, divided by a GradScaler's scale; remembers the state they were taken from.

        Reads the device only if `immediate`. Half-precision gradients are reduced in float32, where their squares
        cannot overflow.
        """
        self.mark()
        values: list[Tensor] = []
        names: list[str] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            grad = parameter.grad
            if grad is None:
                continue
            plain = grad if grad.layout is torch.strided and grad.is_floating_point() else readable(_merged(grad))
            if plain is not None:
                values.append(plain)
                names.append(name)
        norms: Any = []
        if values:
            norms = fused_norms(values) if unit is None else fused_norms(values) / unit
            norms = norms.tolist() if immediate else norms
        return GradNorms(names, norms)


def _state(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    grads = [parameter.grad for parameter in parameters]
    return [(0, -1) if grad is None else (id(grad), grad._version) for grad in grads]


def _merged(grad: Tensor) -> Tensor:
    """A sparse gradient may hold the same row twice; its norm is that of the sums."""
    return grad.coalesce() if grad.layout is torch.sparse_coo else grad


@torch.no_grad()
def fused_norms(values: list[Tensor]) -> Tensor:
    """L2 norms of dense real tensors as one float tensor `[n]`, half types reduced in float32; reads nothing."""
    values = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    half = any(value.dtype in _HALF for value in values)
    norms = torch._foreach_norm(values, 2.0, torch.float32 if half else None)
    first = norms[0]
    if any(norm.device != first.device or norm.dtype != first.dtype for norm in norms):
        norms = tuple(norm.to(first.device, torch.float32) for norm in norms)
    return torch.stack(norms)


def total_norm(norms: Sequence[float]) -> float:
    """L2 norm over all from the norms of the parts, on the host."""
    return math.sqrt(math.fsum(norm * norm for norm in norms)) if norms else 0.0


def exact_norm(grad: Tensor) -> float:
    """Norm of a finite gradient whose float32 norm overflowed: scaled by its largest element, in float64. Reads."""
    values = readable(_merged(grad))
    if values is None:
        return 0.0
    return float(torch.linalg.vector_norm(values.double()))
