"""Learning rates by step: what the user expects, and what was seen of one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gpt_guard.callbacks.gradients.level import RobustHistory
from gpt_guard.errors import GuardUsageError

LearningRates = tuple[float, ...]
"""One for each parameter group."""
OneOrGroups = float | Sequence[float]
Expected = Callable[[int], OneOrGroups] | Sequence[OneOrGroups]

_SAME = 1e-6
_SETTLING = 50
_LONG = 10
_LONG_SHARE = 0.05
_LEAST_STEPS = 3
_SAVED_RATES = ("last", "before", "first")
_SAVED_NUMBERS = ("step", "position", "highest", "total", "rose", "zeros", "was_positive")


class ExpectedLR:
    """Gives the expected lr by group at a step; the same for all groups where one number is given."""

    def __init__(self, expected: Expected, *, rtol: float) -> None:
        if not callable(expected) and (isinstance(expected, str) or not isinstance(expected, Sequence)):
            raise GuardUsageError(
                f"LRTracker(expected={expected!r}) cannot work: give a function of the step number that returns the "
                f"learning rate (or one for each group), or a list with one entry for each step"
            )
        self._expected = expected
        self._rtol = rtol
        self._largest = 0.0

    def at(self, step: int, groups: int) -> tuple[float, ...] | None:
        """The expected lr at this step for this many groups; None outside of a list."""
        if callable(self._expected):
            value = self._expected(step)
        elif 0 <= step < len(self._expected):
            value = self._expected[step]
        else:
            return None
        if isinstance(value, Sequence):
            if len(value) != groups:
                raise GuardUsageError(
                    f"expected= gives {len(value)} learning rates at step {step}; the optimizer has {groups} groups"
                )
            return tuple(float(each) for each in value)
        return (float(value),) * groups

    def matches(self, lr: tuple[float, ...], expected: tuple[float, ...]) -> bool:
        """Whether both agree to within rtol of the larger, or of a millionth of the largest lr expected so far.

        The second keeps a cosine's end, which is 1e-20 instead of 0, from counting as a difference.
        """
        self._largest = max(self._largest, *map(abs, expected))
        floor = 1e-6 * self._largest
        return all(
            abs(own - want) <= self._rtol * max(abs(own), abs(want), floor)
            for own, want in zip(lr, expected, strict=True)
        )

    def shift(self, step: int, lr: tuple[float, ...]) -> int | None:
        """By how many steps (1 or 2, either way) the schedule is off, if that explains this lr."""
        for by in (-1, 1, -2, 2):
            if step + by >= 0:
                other = self.at(step + by, len(lr))
                if other is not None and self.matches(lr, other):
                    return by
        return None


class LRTrack:
    """Bounded memory for one optimizer: its learning rates, their range, and the usual gradient norm.

    `last` and `before` are the lr of its last two steps, by group; `first` that of the run's first step, `began` that
    of the first since entry. `total` counts the steps of the run, `steps` those since entry, `unchanged` those in a row
    with one lr. `rose` is the step of the highest lr. `position` is where the scheduler stood.
    """

    def __init__(self, history: RobustHistory) -> None:
        self.history = history
        self.last: LearningRates = ()
        self.before: LearningRates = ()
        self.step = -1
        self.position: int | None = None
        self.first: LearningRates = ()
        self.began: LearningRates = ()
        self.highest = 0.0
        self.lowest = math.inf
        self.zeros = 0
        self.was_positive = False
        self.vanished = 0
        self.reported_vanished = False
        self.restarts = 0
        self.looks = 0
        self.resumed = False
        self.steps = 0
        self.total = 0
        self.rose = 0
        self.changed = False
        self.unchanged = 0
        self.skipped = 0
        self.off_schedule = False

    def begin(self) -> None:
        """A new stretch begins: what is counted for its end starts again, and a jump may follow."""
        self.resumed = bool(self.last)
        self.steps = self.skipped = self.unchanged = self.restarts = self.looks = 0
        self.changed = False

    def take(self, step: int, lr: LearningRates) -> None:
        """Note the lr of a step, after it has been judged."""
        self.began = lr if not self.steps else self.began
        self.first = self.first or lr
        self.steps += 1
        self.total += 1
        self.unchanged += 1
        if self.steps > 1 and lr != self.last:
            self.changed, self.unchanged = True, 1
        self.before, self.last, self.step = self.last, lr, step
        top = max(lr, default=math.nan)
        if 0.0 <= top < math.inf:
            if top > self.highest:
                self.highest, self.rose = top, self.total
            if top < self.lowest:
                self.lowest = top

    def has_vanished(self, lr: LearningRates, share: float) -> bool:
        """Count this step if its lr, taken in already, is below that share of the highest; True once it has been long.

        Long is 10 steps in a row and 5 % of the run so far: a cosine over 100,000 steps spends its last 63 below a
        millionth of its peak, a cubic decay its last percent.
        """
        if not 0.0 < max(lr, default=0.0) < share * self.highest:
            self.vanished = 0
            return False
        self.vanished += 1
        long = self.vanished >= max(_LONG, _LONG_SHARE * self.total)
        known, self.reported_vanished = self.reported_vanished, self.reported_vanished or long
        return long and not known

    def at_peak(self, lr: LearningRates) -> bool:
        """Whether this is (within 5 %) the highest lr seen so far, in a schedule that has been at less than half.

        Where the lr stays at its highest for good, the peak ends after as many steps as it took to get there.
        """
        top = max(lr, default=math.nan)
        if self.total - self.rose > max(_SETTLING, self.rose):
            return False
        return top >= 0.95 * self.highest and self.lowest < 0.5 * max(top, self.highest)

    def leaps_back(self, lr: LearningRates, factor: float) -> bool:
        """Whether this lr, not taken in yet, is back at the first one since entry, by a leap of that factor or more."""
        if lr == self.last or self.steps < _LEAST_STEPS or len(lr) != len(self.last):
            return False
        leap = any(max(now, was) >= factor * min(now, was) for was, now in zip(self.last, lr, strict=True))
        return leap and same_rates(lr, self.began)

    def jump(self, lr: LearningRates, limit: float) -> tuple[int, float] | None:
        """The group and factor of the largest jump from the last known lr, or None if it is within the limit.

        A step from zero (the start of a warm-up) is no jump, and neither is going on as the last two steps did.
        """
        if len(lr) != len(self.last):
            return None
        factors = [
            (place, now / was)
            for place, (was, now) in enumerate(zip(self.last, lr, strict=True))
            if was > 0.0 and math.isfinite(now)
        ]
        limit *= 1.0 + 1e-6
        jumps = [
            (place, factor)
            for place, factor in factors
            if not 1.0 / limit <= factor <= limit and not self._goes_on(place, factor, limit)
        ]
        return max(jumps, key=lambda jump: abs(_log(jump[1])), default=None)

    def _goes_on(self, place: int, factor: float, limit: float) -> bool:
        if len(self.before) != len(self.last) or not self.before[place] > 0.0:
            return False
        usual = self.last[place] / self.before[place]
        return usual != 1.0 and 1.0 / limit <= factor / usual <= limit

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return (
            {"history": self.history.state_dict(), "lowest": self.lowest if self.lowest < math.inf else None}
            | {name: list(getattr(self, name)) for name in _SAVED_RATES}
            | {name: getattr(self, name) for name in _SAVED_NUMBERS}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; the next step is one after a resume."""
        self.history.load_state_dict(state["history"])
        self.lowest = math.inf if state["lowest"] is None else float(state["lowest"])
        for name in _SAVED_RATES:
            setattr(self, name, tuple(map(float, state[name])))
        for name in _SAVED_NUMBERS:
            setattr(self, name, state[name])
        self.begin()


def same_rates(one: LearningRates, other: LearningRates) -> bool:
    """Whether all groups have the same lr, but for rounding."""
    close = (abs(a - b) <= _SAME * max(abs(a), abs(b)) for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and all(close)


def _log(factor: float) -> float:
    return math.log(factor) if factor > 0.0 else -math.inf
