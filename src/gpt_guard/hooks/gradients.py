"""Gradient norms, measured once per moment however many guards ask, and only if the gradients have changed since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.tensors import readable

# Two norms of the same half-precision gradient agree to float32 rounding.
_SAME = 1e-5
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
        self._by_name = parameters
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self._mark: list[tuple[int, int]] = []

    def current(self) -> list[Tensor | None]:
        """The gradients now, None where there is none."""
        return [parameter.grad for parameter in self.parameters]

    def mark(self) -> bool:
        """Remember the state of all gradients; True if they were cleared since it was last remembered.

        That is: no parameter has one, or each one was written by something else than a backward, as
        `zero_grad(set_to_none=False)` does.
        """
        before, self._mark = self._mark, _state(self.parameters)
        held = [(old, new) for old, new in zip(before, self._mark, strict=False) if new[1] >= 0]
        return all(old != new for old, new in held)

    @property
    def state(self) -> list[tuple[int, int]]:
        """Identity and version of each gradient as last remembered; version -1 where there is none."""
        return self._mark

    def touched(self) -> bool:
        """Whether any gradient has been replaced or written since `mark`."""
        return _state(self.parameters) != self._mark

    def altered(self, measured: GradNorms, unit: Tensor | float | None, *, immediate: bool) -> bool:
        """Whether gradients may differ from when they were measured, also by a write that no counter shows.

        `grad.data.clamp_()` and a GradScaler's `unscale_()` leave the version counter as it is. Where reading is free,
        the gradient with the largest norm stands for all: what leaves that one alone changes the total little. On an
        accelerator the answer is yes: to measure again costs it less than a read would.
        """
        if not immediate or self.touched():
            return True
        finite = [norm for norm in measured.norms if norm < math.inf]
        if not finite:
            return False
        largest = max(finite)
        grad = self._by_name[measured.names[measured.norms.index(largest)]].grad
        plain = None if grad is None else _plain(grad)
        if plain is None:
            return True
        now = fused_norms([plain]) if unit is None else fused_norms([plain]) / unit
        return abs(float(now) - largest) > _SAME * largest

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
            plain = _plain(grad)
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


def _plain(grad: Tensor) -> Tensor | None:
    usual = grad.layout is torch.strided and grad.is_floating_point()
    return grad if usual else readable(_merged(grad))


def _merged(grad: Tensor) -> Tensor:
    """A sparse gradient may hold the same row twice; its norm is that of the sums."""
    return grad.coalesce() if grad.layout is torch.sparse_coo else grad


@torch.no_grad()
def fused_norms(values: list[Tensor]) -> Tensor:
    """L2 norms of dense real tensors as one float tensor `[n]`, half types reduced in float32; reads nothing."""
    values = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    kinds = {value.dtype for value in values}
    wide = torch.float64 if torch.float64 in kinds else torch.float32
    norms = torch._foreach_norm(values, 2.0, None if kinds.isdisjoint(_HALF) else wide)
    device = norms[0].device
    if len(kinds) > 1 or any(norm.device != device for norm in norms):
        norms = tuple(norm.to(device, wide) for norm in norms)
    return torch.stack(norms)


def total_norm(norms: Sequence[float]) -> float:
    """L2 norm over all from the norms of the parts, on the host; squares cannot overflow in it."""
    return math.hypot(*norms)


def exact_norm(grad: Tensor) -> float:
    """Norm of a finite gradient whose float32 norm overflowed: scaled by its largest element, in float64. Reads."""
    values = readable(_merged(grad))
    if values is None:
        return 0.0
    return float(torch.linalg.vector_norm(values.double()))
