"""Gradient norms, measured once per moment however many guards ask, and only if the gradients have changed since."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpt_guard.hooks.tensors import readable, shard_of

_R = TypeVar("_R")
_HALF = (torch.float16, torch.bfloat16)
# Identity and version of a gradient that does not exist.
_NONE = (0, -1)


class GradNorms(NamedTuple):
    """L2 norms of the gradients that exist: names, and norms as floats (CPU) or as one device tensor `[n]`."""

    names: list[str]
    norms: Any


class Gradients:
    """The gradients of a list of parameters: whether they changed, and their L2 norms.

    Changes are noticed by identity and version counter, which costs no device work. Norms are one fused call over all
    gradients; they stay on the device until the ledger reads them.
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._mark: list[tuple[int, int]] = []
        self._take(parameters)

    def _take(self, parameters: dict[str, Tensor]) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self._nothing = [_NONE] * len(self.parameters)
        self.ordinary = ordinary(self.parameters)

    def renew(self, parameters: dict[str, Tensor]) -> list[int | None]:
        """Go on with other parameters; returns where each stood before, None for a new one.

        What is remembered of a gradient goes along; those of new parameters are remembered as they are now.
        """
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        moved = [places.get(id(parameter)) for parameter in parameters.values()]
        self._take(parameters)
        if before := self._mark:
            now = zip(self.now(), moved, strict=True)
            self._mark = [state if place is None else before[place] for state, place in now]
        return moved

    def current(self) -> list[Tensor | None]:
        """The gradients now, None where there is none."""
        return [parameter.grad for parameter in self.parameters]

    def mark(self) -> bool:
        """Remember the state of all gradients; True if they were cleared since it was last remembered.

        That is: no parameter has one, or each one was written by something else than a backward, as
        `zero_grad(set_to_none=False)` does.
        """
        before, grads = self._mark, self.current()
        for grad in grads:
            if grad is not None:
                break
        else:
            # As zero_grad() leaves it by default: no list to make.
            self._mark = self._nothing
            return True
        self._mark = _state(grads)
        return all(old != new for old, new in zip(before, self._mark, strict=False) if new[1] >= 0)

    def remember(self) -> None:
        """Remember the state of all gradients as it is now."""
        self._mark = self.now()

    def now(self) -> list[tuple[int, int]]:
        """Identity and version of each gradient now; remembers nothing."""
        return _state(self.current())

    def largest(self, names: Iterable[str], *, immediate: bool) -> Tensor | float | None:
        """The largest norm among the gradients of these parameters, as it is; None if none of them has one."""
        wanted = set(names)
        held, norms = self.measure(None, immediate=immediate)
        places = [place for place, name in enumerate(held) if name in wanted]
        if not places:
            return None
        found: Tensor | float = max(norms[place] for place in places) if immediate else norms[places].max()
        return found

    @property
    def state(self) -> list[tuple[int, int]]:
        """Identity and version of each gradient as last remembered; version -1 where there is none."""
        return self._mark

    def touched(self, grads: list[Tensor | None] | None = None) -> bool:
        """Whether any gradient was replaced or written since it was last remembered; remembers all as they are now.

        `grads` is what `current()` gives, for a caller that needs it for more than this: each tensor has to be fetched
        from far away after a backward.
        """
        before, self._mark = self._mark, _state(self.current() if grads is None else grads)
        return before != self._mark

    def applied(self, measured: GradNorms, unit: Tensor | float | None, *, immediate: bool) -> GradNorms | None:
        """Norms just before a step, given those after the backward; None if the gradients are still the same.

        Always measures all of them. A version counter would tell most writes, but not `grad.data.clamp_()` or a
        GradScaler's `unscale_()`, and norms of a few gradients would not tell what was done to the others.
        """
        now = self.measure(unit, immediate=immediate)
        same = immediate and now.norms == measured.norms and not self.touched()
        return None if same else now

    def measure(
        self, unit: Tensor | float | None, *, immediate: bool, current: list[Tensor | None] | None = None
    ) -> GradNorms:
        """Norms of all gradients now (or of `current`, if it is at hand), divided by a GradScaler's scale.

        Reads the device only if `immediate`. Half-precision gradients are reduced in float32, where their squares
        cannot overflow.
        """
        grads = [grad for grad in (self.current() if current is None else current) if grad is not None]
        if not grads:
            return GradNorms([], [])
        names = self.names if len(grads) == len(self.names) else self._held()
        parts = self._ordinary_norms(grads)
        if parts is not None and immediate and unit is None:
            # Where reading is free, one number after the other costs less than joining them first.
            return GradNorms(names, [part.item() for part in parts])
        if parts is not None:
            norms = torch.stack(parts)
        else:
            plain = {name: each for name, grad in zip(names, grads, strict=True) if (each := _plain(grad)) is not None}
            if not plain:
                return GradNorms([], [])
            names, norms = list(plain), fused_norms(list(plain.values()))
        norms = norms if unit is None else norms / unit
        return GradNorms(names, norms.tolist() if immediate else norms)

    def _ordinary_norms(self, grads: list[Tensor]) -> tuple[Tensor, ...] | None:
        """The norms of ordinary gradients, without a look at each; None where there may be others."""
        if not self.ordinary:
            return None
        try:
            return norms_of(grads)
        except NotImplementedError:
            # A sparse gradient of an ordinary parameter: an embedding's. It will stay so.
            self.ordinary = False
            return None

    def _held(self) -> list[str]:
        return [name for name, parameter in zip(self.names, self.parameters, strict=True) if parameter.grad is not None]


def ordinary(parameters: Sequence[Tensor]) -> bool:
    """Whether all are plain dense tensors of one device and one wide dtype: no gradient needs a look of its own."""
    kinds = {(type(each), each.layout, each.dtype, each.device) for each in parameters}
    if len({kind[2:] for kind in kinds}) != 1:
        return False
    return all(
        kind in (Tensor, nn.Parameter) and layout is torch.strided and dtype in (torch.float32, torch.float64)
        for kind, layout, dtype, _ in kinds
    )


def norms_of(values: list[Tensor]) -> tuple[Tensor, ...]:
    """One norm for each ordinary tensor; no graph is built, also where one hangs on them (create_graph=True)."""
    return without_graph(torch._foreach_norm, values, 2.0)


def without_graph(function: Callable[..., _R], *args: Any) -> _R:
    """Call it as inside of torch.no_grad(), without the two microseconds that making one takes."""
    if not torch.is_grad_enabled():
        return function(*args)
    try:
        torch._C._set_grad_enabled(False)
        return function(*args)
    finally:
        torch._C._set_grad_enabled(True)


def _state(grads: list[Tensor | None]) -> list[tuple[int, int]]:
    return [_NONE if grad is None else (id(grad), grad._version) for grad in grads]


def _plain(grad: Tensor) -> Tensor | None:
    usual = grad.layout is torch.strided and grad.is_floating_point()
    return grad if usual else readable(_merged(grad))


def _merged(grad: Tensor) -> Tensor:
    """A sparse gradient may hold the same row twice; its norm is that of the sums."""
    return grad.coalesce() if grad.layout is torch.sparse_coo else grad


@torch.no_grad()
def fused_norms(values: list[Tensor]) -> Tensor:
    """L2 norms of dense real tensors as one float tensor `[n]`, half types reduced in float32; reads nothing."""
    values = list(map(shard_of, values))
    kinds = {value.dtype for value in values}
    wide = torch.float64 if torch.float64 in kinds else torch.float32
    norms = torch._foreach_norm(values, 2.0, None if kinds.isdisjoint(_HALF) else wide)
    device = norms[0].device
    if len(kinds) > 1 or any(norm.device != device for norm in norms):
        norms = tuple(norm.to(device, wide) for norm in norms)
    return torch.stack(norms)


def total_norm(norms: Iterable[float]) -> float:
    """L2 norm over all from the norms of the parts, on the host; squares cannot overflow in it."""
    return math.hypot(*norms)


def exact_norm(grad: Tensor) -> float:
    """Norm of a finite gradient whose float32 norm overflowed: scaled by its largest element, in float64. Reads."""
    values = readable(_merged(grad))
    if values is None:
        return 0.0
    return float(torch.linalg.vector_norm(values.double()))
