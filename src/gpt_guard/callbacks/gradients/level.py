"""What is usual for this run: a robust history that one wild value cannot move and one NaN cannot blind."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from gpt_guard.errors import GuardUsageError

# 1 / Phi^-1(3/4): makes the median absolute deviation estimate the standard deviation of a normal distribution
# (Rousseeuw & Croux, "Alternatives to the Median Absolute Deviation", JASA 88, 1993).
MAD_TO_SIGMA = 1.4826

Side = Literal["usual", "high", "low"]


class Standing(NamedTuple):
    """Where a value stands against the history.

    `factor` is value / median; `sigmas` the distance in robust standard deviations of the logarithm, infinite where
    the history is constant. `streak` counts the values in a row on this side. `adopted` is True on the one value with
    which a lasting new level has become the history.
    """

    side: Side
    factor: float
    sigmas: float
    median: float
    streak: int
    adopted: bool


class RobustHistory:
    """Median and spread of the last `window` usual values, all positive and finite, on a logarithmic scale.

    A value is high or low if it is off the median by a factor *and* by more than `sigmas` robust standard deviations
    (Iglewicz & Hoaglin, "How to Detect and Handle Outliers", 1993, take 3.5; the default 6 allows for the heavier
    tails of gradient norms). Such a value never enters the history. Only when `adopt_after` of them follow one another
    on one side are they a new level, and become the history.

    Nothing is judged before `least` values are known. Taking a value costs a few microseconds: the values are kept
    sorted, and the spread is only computed for a value that is already off by the factor.
    """

    def __init__(self, *, window: int = 100, least: int = 20, sigmas: float = 6.0, adopt_after: int = 20) -> None:
        if not 2 <= least <= window or adopt_after < 1 or not sigmas >= 0:
            raise GuardUsageError(
                f"a history of window={window} values cannot judge from least={least} on with sigmas={sigmas} and "
                f"adopt_after={adopt_after}: it needs 2 <= least <= window, sigmas >= 0 and adopt_after >= 1"
            )
        self.least = least
        self._limit = sigmas
        self._adopt_after = adopt_after
        self._recent: deque[float] = deque(maxlen=int(window))
        self._sorted: list[float] = []
        self._outliers: list[float] = []
        self._side: Side = "usual"

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def median(self) -> float:
        """Median of the usual values; NaN while there is none."""
        return math.exp(middle(self._sorted)) if self._sorted else math.nan

    def take(self, value: float, *, high: float = math.inf, low: float = 0.0) -> Standing | None:
        """Judge a value against the history, and let it enter if it is usual.

        `high` and `low` are factors of the median. Returns None if nothing can be judged: too few values are known, or
        this one is zero, negative or not finite (such a value is left out).
        """
        if not 0.0 < value < math.inf:
            return None
        log = math.log(value)
        if len(self._sorted) < self.least:
            self._enter(log)
            return None
        center = middle(self._sorted)
        factor = math.exp(min(log - center, 700.0))
        side: Side = "high" if factor >= high else "low" if factor <= low else "usual"
        distance = 0.0
        if side != "usual":
            distance = self._distance(log, center)
            side = side if distance > self._limit else "usual"
        if side == "usual":
            self._outliers.clear()
            self._side = side
            self._enter(log)
            return Standing(side, factor, distance, math.exp(center), 0, False)
        return self._take_outlier(side, log, factor, distance, math.exp(center))

    def _take_outlier(self, side: Side, log: float, factor: float, distance: float, median: float) -> Standing:
        if side != self._side:
            self._outliers.clear()
            self._side = side
        self._outliers.append(log)
        streak = len(self._outliers)
        adopted = streak >= self._adopt_after
        if adopted:
            self._recent.clear()
            self._sorted.clear()
            for each in self._outliers:
                self._enter(each)
            self._outliers.clear()
            self._side = "usual"
        return Standing(side, factor, distance, median, streak, adopted)

    def _enter(self, log: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(log)
        insort(self._sorted, log)

    def _distance(self, log: float, center: float) -> float:
        sigma = MAD_TO_SIGMA * middle(sorted(abs(each - center) for each in self._sorted))
        return abs(log - center) / sigma if sigma > 0.0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """The values as logarithms, oldest first, and the outliers."""
        return {"logs": list(self._recent), "aside": list(self._outliers), "side": self._side}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; of more values than the window holds, the newest stay."""
        self._recent.clear()
        self._sorted.clear()
        for log in _finite(state["logs"]):
            self._enter(log)
        self._outliers = list(_finite(state["aside"]))[: self._adopt_after - 1]
        self._side = state["side"] if state["side"] in ("high", "low") else "usual"


def _finite(values: Iterable[Any]) -> Iterable[float]:
    return (number for number in map(float, values) if math.isfinite(number))


def middle(ordered: Sequence[float]) -> float:
    """Median of values that are sorted already; there must be one."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which about this share of all lies (nearest rank); there must be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
