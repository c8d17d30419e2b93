"""How far a run has come, and what a resumed one goes on from: counts, observations, the state of its guards."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.checkpointing.fingerprint import CheckpointFingerprint
from gpt_guard.records import Observation

_KEPT = 5
_SERIES = 10_000


class Progress:
    """Survives leaving and re-entering a Guardian; holds floats only, in bounded memory.

    `steps` counts the steps of each optimizer from `start_step`; `step` is the furthest of them. `recent` keeps the
    last few finished observations for the table in an error.
    """

    def __init__(self, start_step: int, optimizers: int) -> None:
        self.steps = [start_step] * max(1, optimizers)
        self.start_step = start_step
        self.tokens = 0
        self.samples = 0
        self.skipped = 0
        self.latest: Observation | None = None
        self.recent: deque[Observation] = deque(maxlen=_KEPT)
        self.metrics: dict[str, float] = {}
        self.times_logged: dict[str, int] = {}
        self.clipped = 0
        self.finished = 0
        self.inspected: dict[str, Any] = {}
        # Of each stretch, the seconds that watching took, and all of them.
        self.costs: list[tuple[float, float]] = []
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.lr_min: float | None = None
        self.lr_max: float | None = None
        self._norms: deque[float] = deque(maxlen=_SERIES)
        self._norm_max: float | None = None

    def adopt(self, optimizers: int) -> None:
        """There are so many optimizers by now; a new one is about to make the step that the others have just made."""
        self.steps += [max(self.start_step, self.step - 1)] * (optimizers - len(self.steps))

    @property
    def step(self) -> int:
        """Optimizer steps made, counted from `start_step`."""
        return max(self.steps)

    def finish(self, seen: Observation) -> None:
        """Take in the complete observation of a step."""
        self.latest = seen
        self.recent.append(seen)
        self.finished += 1
        if seen.clipped:
            self.clipped += 1
        loss = seen.loss
        if loss is not None:
            if self.first_loss is None:
                self.first_loss = loss
            self.last_loss = loss
        for lr in seen.lr:
            if self.lr_min is None or lr < self.lr_min:
                self.lr_min = lr
            if self.lr_max is None or lr > self.lr_max:
                self.lr_max = lr
        norm = seen.grad_norm
        if norm is not None:
            self._norms.append(norm)
            if self._norm_max is None or not self._norm_max >= norm:
                self._norm_max = norm

    def log(self, numbers: dict[str, float]) -> None:
        """Take in numbers of the user's own; how often each came tells an old one from an equal one."""
        self.metrics.update(numbers)
        for name in numbers:
            self.times_logged[name] = self.times_logged.get(name, 0) + 1

    def facts(self) -> dict[str, Any]:
        """The figures of the summary, by the field names of Report."""
        return {
            "steps": self.step,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "lr_min": self.lr_min,
            "lr_max": self.lr_max,
            "grad_norm_median": statistics.median(self._norms) if self._norms else None,
            "grad_norm_max": self._norm_max,
            "clipped_share": self.clipped / self.finished if self.finished else None,
            "skipped_steps": self.skipped,
            "watch_cost": self._watch_cost(),
            **self.inspected,
        }

    def _watch_cost(self) -> float | None:
        spent, passed = (sum(column) for column in zip(*self.costs, strict=True)) if self.costs else (0.0, 0.0)
        return spent / passed if passed and self.finished else None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on counting from; plain numbers."""
        return {"steps": list(self.steps), "tokens": self.tokens, "samples": self.samples, "skipped": self.skipped}

    def start_at(self, step: int) -> None:
        """Go on counting from a step."""
        self.steps = [step] * len(self.steps)
        self.start_step = step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state."""
        saved = [int(step) for step in state["steps"]]
        self.steps = saved if len(saved) == len(self.steps) else [max(saved)] * len(self.steps)
        self.start_step = self.step
        self.tokens, self.samples = int(state["tokens"]), int(state["samples"])
        self.skipped = int(state["skipped"])


def stamp_of(guards: Sequence[Guard], belongings: dict[str, Any]) -> dict[str, Any]:
    """What the run belongs to: what a CheckpointFingerprint among the guards says, or what Guardian was given."""
    stamps = [guard.belongings for guard in guards if isinstance(guard, CheckpointFingerprint)]
    return stamps[0] if stamps else belongings


def state_of(progress: Progress, guards: Sequence[Guard]) -> dict[str, Any]:
    """Plain numbers, loadable with `weights_only=True`."""
    return {"progress": progress.state_dict(), "guards": {guard.name: guard.state_dict() for guard in guards}}


def take_back(state: dict[str, Any], progress: Progress, guards: Sequence[Guard]) -> None:
    """Go on from what `state_of` gave; guards that were not there then start fresh."""
    progress.load_state_dict(state["progress"])
    for guard in guards:
        if guard.name in state["guards"]:
            guard.load_state_dict(state["guards"][guard.name])
