"""Gradient norms, measured once per moment however many guards ask, and only if the gradients have changed since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.tensors import readable

# Two norms of the same gradient agree to float32 rounding.
_SAME = 1e-5
_FEW = 3
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
        self._ordinary = _ordinary(self.parameters)
        self._spread = list(range(0, len(self.parameters), max(1, len(self.parameters) // _FEW)))

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
        """Whether any gradient was replaced or written since it was last remembered; remembers all as they are now."""
        before, self._mark = self._mark, _state(self.parameters)
        return before != self._mark

    def applied(self, measured: GradNorms, unit: Tensor | float | None, *, immediate: bool) -> GradNorms | None:
        """Norms just before a step, given those after the backward; None if the gradients are still the same.

        A version counter tells most writes, but not all: `grad.data.clamp_()` and a GradScaler's `unscale_()` leave it
        as it is. Where reading is free, a few gradients stand for all in the two usual cases: nobody has written to
        any, or all were scaled down by one factor, as `clip_grad_norm_` does. Anything else is measured; so is
        everything on an accelerator, where that costs less than a read would.
        """
        touched = self.touched()
        if immediate and (factor := self._common_factor(measured, unit)) is not None:
            if factor < 1.0 - _SAME:
                return GradNorms(measured.names, [norm * factor for norm in measured.norms])
            if factor < 1.0 + _SAME and not touched:
                return None
        return self.measure(unit, immediate=immediate)

    def _common_factor(self, measured: GradNorms, unit: Tensor | float | None) -> float | None:
        """By what the gradients of the largest norms and a few others were all multiplied; None if by no one factor."""
        if not self._ordinary or len(measured.norms) != len(self.names):
            return None
        norms = measured.norms
        places = sorted(range(len(norms)), key=norms.__getitem__)[-_FEW:] + self._spread
        grads = [self.parameters[place].grad for place in places]
        present = [grad for grad in grads if grad is not None]
        if len(present) < len(places) or not all(0.0 < norms[place] < math.inf for place in places):
            return None
        now = stacked_norms(present) if unit is None else stacked_norms(present) / unit
        factors = [after / norms[place] for after, place in zip(now.tolist(), places, strict=True)]
        low, high = min(factors), max(factors)
        return high if high - low <= _SAME * high else None

    def measure(self, unit: Tensor | float | None, *, immediate: bool) -> GradNorms:
        """Norms of all gradients now, divided by a GradScaler's scale.

        Reads the device only if `immediate`. Half-precision gradients are reduced in float32, where their squares
        cannot overflow.
        """
        names, norms = self._norms()
        if norms is None:
            return GradNorms(names, [])
        norms = norms if unit is None else norms / unit
        return GradNorms(names, norms.tolist() if immediate else norms)

    def _norms(self) -> tuple[list[str], Tensor | None]:
        grads = [grad for parameter in self.parameters if (grad := parameter.grad) is not None]
        if not grads:
            return [], None
        if self._ordinary:
            try:
                norms = stacked_norms(grads)
            except NotImplementedError:
                # A sparse gradient of an ordinary parameter: an embedding's. It will stay so.
                self._ordinary = False
            else:
                return self.names if len(grads) == len(self.names) else self._held(), norms
        found = {
            name: plain for name, grad in zip(self._held(), grads, strict=True) if (plain := _plain(grad)) is not None
        }
        return list(found), fused_norms(list(found.values())) if found else None

    def _held(self) -> list[str]:
        return [name for name, parameter in zip(self.names, self.parameters, strict=True) if parameter.grad is not None]


def _ordinary(parameters: Sequence[Tensor]) -> bool:
    """Whether all are plain dense tensors of one device and one wide dtype: no gradient needs a look of its own."""
    kinds = {(type(each), each.layout, each.dtype, each.device) for each in parameters}
    if len({kind[2:] for kind in kinds}) != 1:
        return False
    return all(
        kind in (Tensor, nn.Parameter) and layout is torch.strided and dtype in (torch.float32, torch.float64)
        for kind, layout, dtype, _ in kinds
    )


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


@torch.no_grad()
def stacked_norms(values: list[Tensor]) -> Tensor:
    """The same for tensors of one device and one wide dtype: no look at each. Raises NotImplementedError for sparse."""
    return torch.stack(torch._foreach_norm(values, 2.0))


def total_norm(norms: Iterable[float]) -> float:
    """L2 norm over all from the norms of the parts, on the host; squares cannot overflow in it."""
    return math.hypot(*norms)


def exact_norm(grad: Tensor) -> float:
    """Norm of a finite gradient whose float32 norm overflowed: scaled by its largest element, in float64. Reads."""
    values = readable(_merged(grad))
    if values is None:
        return 0.0
    return float(torch.linalg.vector_norm(values.double()))
