"""Which parameters do not move as they should, from the figures of the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gpt_guard.callbacks.updates.findings import Facts, frozen_moved, judge_exact, zero_gradient
from gpt_guard.callbacks.updates.measured_step import ExactComparison, MeasuredStep, UpdateSampler
from gpt_guard.callbacks.updates.ratio import RatioBounds, RatioWatch
from gpt_guard.callbacks.updates.sampling import SampledParameters, StepFigures
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation, Severity

# After any of these a small update has its reason.
_EXPLAINS = ("GG301", "GG302 ", "GG304 explains", "GG305", "GG307 stale", "GG310", "GG311", "GG312", "GG315")
_CONDITIONAL = 10
_RISING = 0.1
_THAWED = 2
_FAR_BELOW_PEAK = 0.1
_CONVERGED = 1e-3
# Two steps in a row: one can be a step that an optimizer leaves out on purpose.
_IDLE_STEPS = 2


@dataclass
class _History:
    """Counters by parameter name of one optimizer; all empty for a healthy run after its first steps.

    A step counts for a tenth while its learning rate still rises (small updates are what a warm-up is for) and not at
    all below a tenth of the highest one so far (they are what a decay is for). `still` counts steps without a movement,
    `zero` those with a gradient of exactly zero ever since they were first seen, `thawing` movements of frozen
    parameters; `alive` are those that had a gradient, `movers` those that moved.
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

    def quiet(self, sampled: SampledParameters, least: float) -> bool:
        """Whether nothing needs to be counted: all moved, at least by a share of `least`, and nothing waits."""
        if sampled.any_frozen or least <= (self.kept if sampled.any_half else 0.0):
            return False
        self.all_moved = True
        return not (self.still or self.idle or self.thawing or len(self.alive) < len(sampled.names))

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

    def count(self, facts: Facts, sampled: SampledParameters, figures: StepFigures, weight: float) -> None:
        """Count what stood still although it has a gradient and a learning rate, and gradients of exactly zero."""
        eligible = moved = False
        grads = facts.seen.grad_norms
        for name, share, trains, half in zip(sampled.names, figures.share, sampled.trains, sampled.half, strict=True):
            moved = moved or share != 0.0
            if not trains:
                self._count_frozen(name, share)
                continue
            if not grads.get(name) or not facts.lr[name] > 0.0:
                continue
            eligible = True
            if share == 0.0 or (half and share < self.kept):
                self.still[name] = self.still.get(name, 0.0) + weight
            else:
                self.still.pop(name, None)
                self.movers.add(name)
        self.idle = self.idle + weight if eligible and not moved else 0.0
        self._count_zero_grads(sampled, grads)

    def _count_frozen(self, name: str, share: float) -> None:
        if share == 0.0:
            self.thawing.pop(name, None)
        else:
            self.thawing[name] = self.thawing.get(name, 0) + 1

    def _count_zero_grads(self, sampled: SampledParameters, grads: Mapping[str, float | None]) -> None:
        for name, own, trains in zip(sampled.names, sampled.own, sampled.trains, strict=True):
            if name in self.alive:
                continue
            grad = grads.get(name)
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

    def stuck(self) -> list[str]:
        """Names that have stood still for `patience` steps."""
        return [name for name, count in self.still.items() if count >= self.patience]

    def excuse(self, names: Sequence[str]) -> None:
        """These do move, if rarely: look again after ten times the patience."""
        for name in names:
            self.still[name] = -float(_CONDITIONAL * self.patience)

    def state_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("patience", "kept")}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            taken = set(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
            setattr(self, key, taken)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


class Movement:
    """Counters and a `RatioWatch` for each optimizer; `reported` holds what was told already, and is added to."""

    def __init__(self, reported: set[str], patience: int, lost: float, bounds: RatioBounds) -> None:
        self._reported = reported
        self._patience = patience
        self._lost = lost
        self._bounds = bounds
        self._histories: dict[int, _History] = {}
        self._ratios: dict[int, RatioWatch] = {}

    def _history(self, index: int) -> _History:
        if index not in self._histories:
            self._histories[index] = _History(self._patience, 1.0 - self._lost)
        return self._histories[index]

    def ratio_watch(self, index: int) -> RatioWatch:
        """What judges the update-to-weight ratio of optimizer `index`."""
        if index not in self._ratios:
            self._ratios[index] = RatioWatch(self._bounds)
        return self._ratios[index]

    def _explained(self) -> bool:
        """Whether it has been told already why nothing moves."""
        return any(key.startswith(_EXPLAINS) for key in self._reported)

    def judge(
        self, watch: Watch, sampler: UpdateSampler, seen: Observation, measured: MeasuredStep, figures: StepFigures
    ) -> Iterator[Finding]:
        """Take in one step; tell what is proved and have suspects compared exactly."""
        sampled, index, history = measured.sampled, seen.optimizer, self._history(seen.optimizer)
        if not measured.closure:
            yield from self.ratio_watch(index).judge(seen, sampled.weights, self._explained)
        weight = history.weigh(max(seen.lr, default=0.0), seen.grad_norm)
        if history.quiet(sampled, figures.least) and not measured.exact:
            return
        lr = [seen.lr[group] if group < len(seen.lr) else 0.0 for group in sampled.groups]
        facts = Facts(
            watch,
            watch.optimizers[index],
            seen,
            lr=dict(zip(sampled.names, lr, strict=True)),
            tensors=dict(zip(sampled.names, sampled.tensors, strict=True)),
            ratio_low=self._bounds.low,
        )
        if measured.exact and seen.grad_norm:
            yield from self._judge_exact(facts, measured.exact, history, scaling=measured.scaling)
        if seen.grad_norm:
            # What a closure evaluated several times adds up to is the optimizer's choice; a line search may stay put.
            unusual = measured.closure or history.converged(seen.grad_norm)
            history.count(facts, sampled, figures, 0.0 if unusual else weight)
        if thawed := self._new("GG306", history.thawed()):
            yield frozen_moved(facts, thawed)
        if zero := self._new("GG304", history.never_had_gradient(watch.model)):
            yield self._explains(zero_gradient(facts, zero, self._patience))
        sampler.compare_exactly(index, self._suspects(sampled, history, seen))

    def _judge_exact(
        self, facts: Facts, exact: Mapping[str, ExactComparison], history: _History, *, scaling: bool
    ) -> Iterator[Finding]:
        idle = history.idle >= _IDLE_STEPS
        moved = {name for name in exact if history.has_moved(name)}
        for found, names in judge_exact(facts, exact, moved, idle=idle, lost=self._lost, scaling=scaling):
            self._reported |= {f"moves {name}" for name in names}
            ratio = self.ratio_watch(facts.seen.optimizer)
            # That steps are too small, and that they are too small to change anything, is told once.
            if found.code in ("GG301", "GG309") and "GG309" in ratio.reported:
                continue
            ratio.reported.add(found.code)
            # Parameters get stuck one after the other; that all of them round, or none moves, is told once.
            if found.code == "GG304" or found.code not in self._reported:
                self._reported.add(found.code)
                yield self._explains(found)
        history.excuse([name for name in exact if f"moves {name}" not in self._reported])
        if any(each.changed for each in exact.values()):
            history.idle = 0.0

    def _explains(self, found: Finding) -> Finding:
        """Remember a GG304 that explains small updates, as that of a lone bias does not."""
        if found.code == "GG304" and found.severity is not Severity.INFO:
            self._reported.add("GG304 explains")
        return found

    def _suspects(self, sampled: SampledParameters, history: _History, seen: Observation) -> list[str]:
        """What is to be compared exactly in the next step."""
        if history.idle >= _IDLE_STEPS and not self._reported & {"GG301", "GG315"}:
            trainable = zip(sampled.names, sampled.trains, sampled.own, strict=True)
            return [name for name, trains, own in trainable if trains and own and seen.grad_norms.get(name)]
        if not history.still or "GG315" in self._reported:
            return []
        own = {name for name, own in zip(sampled.names, sampled.own, strict=True) if own}
        return [name for name in history.stuck() if name in own and f"moves {name}" not in self._reported]

    def _new(self, code: str, names: Iterable[str]) -> list[str]:
        fresh = [name for name in names if f"{code} {name}" not in self._reported]
        self._reported |= {f"{code} {name}" for name in fresh}
        return fresh

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return {
            "histories": {str(index): each.state_dict() for index, each in self._histories.items()},
            "ratios": {str(index): each.state_dict() for index, each in self._ratios.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for index, saved in state["histories"].items():
            self._history(int(index)).load_state_dict(saved)
        for index, saved in state["ratios"].items():
            self.ratio_watch(int(index)).load_state_dict(saved)
