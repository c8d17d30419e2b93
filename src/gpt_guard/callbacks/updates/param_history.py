"""How long each parameter of one optimizer has stood still, or had a gradient of exactly zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_CONDITIONAL = 10
_RISING = 0.1
_THAWED = 2
_FAR_BELOW_PEAK = 0.1
_CONVERGED = 1e-3
# Two steps in a row: one can be a step that an optimizer leaves out on purpose.
IDLE_STEPS = 2


@dataclass(frozen=True)
class Moved:
    """One measured step of one optimizer: what runs in parallel does so with `names`.

    `share` is 0 where nothing changed; `half` tells for which names it is the share of changed elements, elsewhere it
    is the largest change. `lr` is that of each name's group, `grads` the norms that are known.
    """

    names: Sequence[str]
    share: Sequence[float]
    lr: Sequence[float]
    own: Sequence[bool]
    trains: Sequence[bool]
    half: Sequence[bool]
    grads: Mapping[str, float | None]


@dataclass
class History:
    """Counters by parameter name; all empty for a healthy run after its first steps.

    A step counts for a tenth while its learning rate still rises (small updates are what a warm-up is for) and not at
    all below a tenth of the highest one so far (they are what a decay is for).
    """

    patience: int
    kept: float
    idle: float = 0.0
    still: dict[str, float] = field(default_factory=dict)
    zero: dict[str, int] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    thawing: dict[str, int] = field(default_factory=dict)
    movers: set[str] = field(default_factory=set)
    all_moved: bool = False
    lr_last: float = 0.0
    lr_peak: float = 0.0
    grad_peak: float = 0.0

    def quiet(self, names: int, least: float, *, half: bool) -> bool:
        """Whether nothing needs to be counted: all of so many tensors moved, at least by `least`, and nothing waits.

        Holds only where nothing is frozen: a frozen tensor must not move.
        """
        if least <= (self.kept if half else 0.0):
            return False
        self.all_moved = True
        return not (self.still or self.idle or self.thawing or len(self.alive) < names)

    def converged(self, grad_norm: float) -> bool:
        """Whether the gradient is next to nothing beside what it was: then standing still is no trouble."""
        return grad_norm < _CONVERGED * self.grad_peak

    def has_moved(self, name: str) -> bool:
        """Whether this parameter moved in an earlier step: if it does so no longer, the run may have converged."""
        return self.all_moved or name in self.movers

    def weigh(self, lr: float, grad_norm: float | None) -> float:
        """What a step with this learning rate, the highest of its groups, and this gradient norm counts for."""
        if grad_norm is not None and self.grad_peak < grad_norm < math.inf:
            self.grad_peak = grad_norm
        rising = self.lr_last > 0.0 and lr > self.lr_last * (1 + 1e-6)
        self.lr_last = lr
        if lr > self.lr_peak:
            self.lr_peak = lr
        if not lr > 0.0 or lr < _FAR_BELOW_PEAK * self.lr_peak:
            return 0.0
        return _RISING if rising else 1.0

    def count(self, step: Moved, weight: float) -> None:
        """Count what stood still although it has a gradient and a learning rate."""
        eligible = moved = False
        for name, share, lr, trains, half in zip(step.names, step.share, step.lr, step.trains, step.half, strict=True):
            moved = moved or share != 0.0
            if not trains:
                self._count_frozen(name, share)
                continue
            grad = step.grads.get(name)
            if not grad or not lr > 0.0:
                continue
            eligible = True
            if share == 0.0 or (half and share < self.kept):
                self.still[name] = self.still.get(name, 0.0) + weight
            else:
                self.still.pop(name, None)
                self.movers.add(name)
        self.idle = self.idle + weight if eligible and not moved else 0.0

    def _count_frozen(self, name: str, share: float) -> None:
        if share == 0.0:
            self.thawing.pop(name, None)
        else:
            self.thawing[name] = self.thawing.get(name, 0) + 1

    def count_zero_grads(self, step: Moved) -> None:
        """Count gradients that have been exactly zero ever since they were first seen."""
        for name, own, trains in zip(step.names, step.own, step.trains, strict=True):
            if name in self.alive:
                continue
            grad = step.grads.get(name)
            if not own or not trains or (grad is not None and grad != 0.0):
                self.alive.add(name)
                self.zero.pop(name, None)
            elif grad is not None:
                self.zero[name] = self.zero.get(name, 0) + 1

    def never_had_gradient(self, model: nn.Module) -> list[str]:
        """Names whose gradient was zero for `patience` steps; ten times that where siblings are used conditionally."""
        ripe = [name for name, count in self.zero.items() if count >= self.patience]
        return [
            name
            for name in ripe
            if self.zero[name] >= self.patience * _CONDITIONAL or not self._conditional(model, name)
        ]

    def _conditional(self, model: nn.Module, name: str) -> bool:
        """Whether a whole member of a ModuleList or ModuleDict is without gradient while a sibling has one.

        That is what an expert looks like to which no token was sent so far.
        """
        parts = name.split(".")
        for depth in range(1, len(parts) - 1):
            container = ".".join(parts[:depth])
            if not isinstance(_submodule(model, container), (nn.ModuleList, nn.ModuleDict)):
                continue
            member = f"{container}.{parts[depth]}."
            siblings = any(other.startswith(f"{container}.") and not other.startswith(member) for other in self.alive)
            if siblings and not any(other.startswith(member) for other in self.alive):
                return True
        return False

    def thawed(self) -> list[str]:
        """Frozen names that moved in two steps in a row."""
        return [name for name, count in self.thawing.items() if count >= _THAWED]

    def soon(self, steps: int) -> list[str]:
        """Names that may be stuck, or have moved although frozen, within so many steps."""
        return [*self.thawing, *(name for name, count in self.still.items() if count >= self.patience - steps)]

    def stuck(self) -> list[str]:
        """Names that have stood still for `patience` steps."""
        return [name for name, count in self.still.items() if count >= self.patience]

    def excuse(self, names: Sequence[str]) -> None:
        """These do move, if rarely: look again after ten times the patience."""
        for name in names:
            self.still[name] = -float(_CONDITIONAL * self.patience)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        plain = {key: value for key, value in vars(self).items() if key not in ("patience", "kept")}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for key, value in state.items():
            taken = set(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
            setattr(self, key, taken)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
