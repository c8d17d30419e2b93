"""What LRTracker remembers of one optimizer: the last learning rates, their range, and the usual gradient norm."""

from __future__ import annotations

import math
from typing import Any

from gpt_guard.callbacks.gradients.level import RobustHistory

LearningRates = tuple[float, ...]

_SETTLING = 50
_LONG = 10
_LONG_SHARE = 0.05


class LRTrack:
    """Bounded memory for one optimizer; `last` and `before` are the lr of its last two steps, by group.

    `usual` is the last one that was looked at and found to be one that could be meant.
    """

    def __init__(self, history: RobustHistory) -> None:
        self.history = history
        self.last: LearningRates = ()
        self.usual: LearningRates = ()
        self.before: LearningRates = ()
        self.step = -1
        self.position: int | None = None
        self.first: LearningRates = ()
        self.highest = 0.0
        self.lowest = math.inf
        self.zeros = 0
        self.was_positive = False
        self.vanished = 0
        self.told_vanished = False
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
        self.steps = self.skipped = self.unchanged = 0
        self.changed = False

    def take(self, step: int, lr: LearningRates) -> None:
        """Note the lr of a step, after it has been judged."""
        self.steps += 1
        self.total += 1
        if not self.first:
            self.first = lr
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

    def take_usual(self, step: int, lr: LearningRates) -> bool:
        """Take in an lr that could be meant, and is not 0 for all groups; of another nothing is noted: False."""
        if lr != self.usual:
            if not (any(lr) and all(0.0 <= each < math.inf for each in lr)):
                return False
            self.usual = lr
        self.take(step, lr)
        self.zeros, self.was_positive, self.skipped = 0, True, 0
        return True

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
        told, self.told_vanished = self.told_vanished, self.told_vanished or long
        return long and not told

    def at_peak(self, lr: LearningRates) -> bool:
        """Whether this is (within 5 %) the highest lr seen so far, in a schedule that has been at less than half.

        Where the lr stays at its highest for good, the peak ends after as many steps as it took to get there.
        """
        top = max(lr, default=math.nan)
        if self.total - self.rose > max(_SETTLING, self.rose):
            return False
        return top >= 0.95 * self.highest and self.lowest < 0.5 * max(top, self.highest)

    def at_first(self, lr: LearningRates) -> bool:
        """Whether this is the lr of the very first step."""
        same = (abs(now - own) <= 1e-6 * abs(own) for now, own in zip(lr, self.first, strict=False))
        return len(lr) == len(self.first) and all(same)

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
        return {
            "history": self.history.state_dict(),
            "last": list(self.last),
            "before": list(self.before),
            "step": self.step,
            "position": self.position,
            "first": list(self.first),
            "highest": self.highest,
            "lowest": self.lowest if self.lowest < math.inf else None,
            "total": self.total,
            "rose": self.rose,
            "zeros": self.zeros,
            "was_positive": self.was_positive,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; the next step is one after a resume."""
        self.history.load_state_dict(state["history"])
        self.last, self.before = tuple(map(float, state["last"])), tuple(map(float, state["before"]))
        self.first = tuple(map(float, state["first"]))
        self.step, self.position = int(state["step"]), state["position"]
        self.highest = float(state["highest"])
        self.lowest = math.inf if state["lowest"] is None else float(state["lowest"])
        self.total, self.rose = int(state["total"]), int(state["rose"])
        self.zeros, self.was_positive = int(state["zeros"]), bool(state["was_positive"])
        self.begin()


def _log(factor: float) -> float:
    return math.log(factor) if factor > 0.0 else -math.inf
