"""One operation that made non-finite values, and the questions that the rules ask about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gpt_guard.replaying.memory import Maker, NonFiniteOrigin
from gpt_guard.replaying.operations import DETERMINANTS, Op, names
from gpt_guard.replaying.ownership import Read, Result
from gpt_guard.replaying.places import ForwardOperation, OperationPlace
from gpt_guard.replaying.values import HALF, dtype_of, figure, largest, limit


@dataclass(frozen=True)
class FailedOperation:
    """What the operation was given and gave; `node` is the name of the derivative it is a part of, if any."""

    op: Op
    bound: dict[str, Any]
    reads: list[Read]
    result: Result
    position: int
    place: OperationPlace
    phase: Literal["forward", "backward"]
    node: str | None
    forward: ForwardOperation | None

    @property
    def out(self) -> Tensor:
        """The result that is bad."""
        return self.result.tensor.detach()

    def tensor(self, name: str) -> Tensor:
        """The values of an argument before the operation ran.

        Raises TypeError if it is no tensor: a rule that asks for it has nothing to say then.
        """
        if (values := self.optional(name)) is None:
            raise TypeError(f"{name} is no tensor")
        return values

    def optional(self, name: str) -> Tensor | None:
        """The same; None if it is no tensor."""
        value = self.bound.get(name)
        return value.detach() if isinstance(value, Tensor) else None

    def number(self, name: str) -> float | None:
        """An argument that is a Python number, or a tensor of one element."""
        value = self.bound.get(name)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def behind(self, name: str, names: Collection[str], depth: int = 4) -> Maker | None:
        """The nearest operation of one of these names that an argument was computed by."""
        makers = (read.maker for read in self.reads if read.name == name and read.maker is not None)
        return next((found for maker in makers if (found := maker.behind(names, depth)) is not None), None)

    @property
    def of_determinant(self) -> bool:
        """Whether it is the end of torch.logdet, which puts NaN where the determinant is negative."""
        return self.op.base == "where" and self.behind("condition", DETERMINANTS, 3) is not None

    def lost_eps(self, name: str) -> float | None:
        """A small number that was to keep an argument from 0 and is itself 0 in the argument's dtype."""
        values = self.optional(name)
        if values is None or values.dtype not in HALF:
            return None
        for maker in (read.maker for read in self.reads if read.name == name and read.maker is not None):
            for number in maker.numbers(_GUARDS):
                if 0 < number < 1e-3 and float(torch.tensor(number, dtype=values.dtype)) == 0:
                    return number
        return None

    @property
    def masks(self) -> list[NonFiniteOrigin]:
        """The masks and fills among its inputs."""
        bad = (read.bad for read in self.reads if read.bad is not None)
        return [origin for found in bad for origin in found.origins if origin.deliberate]

    @property
    def mask_causes(self) -> tuple[str, ...]:
        """The keys of causes that belong to these themselves."""
        return tuple(dict.fromkeys(origin.cause for origin in self.masks if origin.cause is not None))

    @property
    def beyond(self) -> str:
        """The end of a sentence about a number that is too large: "beyond 65504, the largest float16"."""
        return f"beyond {figure(limit(self.out.dtype))}, the largest {dtype_of(self.out)}"

    def wider(self) -> float | None:
        """The largest magnitude that the bad elements have in a wider dtype; None if they are not finite there either.

        Runs the operation once more on wider copies of its inputs; None as well where that cannot be.
        """
        if self.op.random or not self.op.whole or not self.out.is_floating_point():
            return None
        # bfloat16 has the range of float32.
        wide = torch.float32 if self.out.dtype is torch.float16 else torch.float64
        bound = {name: _widened(value, wide) for name, value in self.bound.items()}
        names = [name for name in self.op.arguments if name in bound]
        first = [bound[name] for name in names if name not in self.op.by_name]
        rest = {name: bound[name] for name in names if name in self.op.by_name and name not in self.op.writes}
        try:
            again = self.op.func(*first, **rest)
        except (RuntimeError, TypeError):
            return None
        again = again[self.position] if isinstance(again, (tuple, list)) else again
        if not isinstance(again, Tensor) or again.shape != self.out.shape:
            return None
        beyond = again.masked_fill(torch.isfinite(self.out), 0)
        return largest(beyond) if bool(torch.isfinite(beyond).all()) else None

    def exceeds(self) -> float | None:
        """The same, if it is beyond the range of the result's dtype."""
        found = self.wider()
        return found if found is not None and found > limit(self.out.dtype) else None


_GUARDS = names("add clamp clamp_min maximum scalar_tensor")


def _widened(value: Any, wide: torch.dtype) -> Any:
    if isinstance(value, torch.dtype):
        return wide
    if isinstance(value, Tensor):
        # A copy also where the dtype is the same: batch norm writes to its statistics and does not say so.
        return value.detach().to(wide, copy=True) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return [_widened(part, wide) for part in value]
    return value


Facts = Mapping[str, tuple[str, ...]]


class Evidence(NamedTuple):
    """What a rule has found: one sentence, the keys of the causes in order, and facts about each argument by name."""

    shows: str
    causes: tuple[str, ...]
    facts: Facts = MappingProxyType({})


Rule = Callable[[FailedOperation], Evidence | None]
"""Looks for one reason; None where it is not this one."""
