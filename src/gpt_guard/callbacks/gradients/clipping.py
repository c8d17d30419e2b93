"""Clipping that is on most of the time: it then sets the size of the updates, and the learning rate no longer does."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpt_guard.callbacks.gradients.history import middle
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Observation, Severity
from gpt_guard.records.render import learning_rates, number

# What clip_grad_norm_ leaves is the same norm each time, to rounding; a division by a count of micro-batches is not.
_PINNED = 0.01
_EVERY = 10
# Losses of reinforcement learning and GANs do not fall while they learn, and their norms are clipped to a few times
# less as a habit: only far beyond it does a loss that does not fall make clipping suspicious.
_HARD = 10.0
_FALLING = 2.0
_RISING = 4.0


class Clipping:
    """The last `window` steps of one optimizer: norms before and after clipping, and the loss.

    Looks at them every ten steps. Speaks once: as a warning where the loss does not fall and the norms are ten times
    the limit, or the loss clearly rises; otherwise as information. After that only a loss that rises under hard
    clipping is worth a warning of its own.
    """

    def __init__(self, *, window: int, share: float, ratio: float) -> None:
        self._share = share
        self._ratio = ratio
        self._steps: deque[tuple[float, float, float | None]] = deque(maxlen=int(window))
        self._taken = 0
        self._said: set[str] = set()
        self._warned = False

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Take in a step; a finding if nearly all of the last ones were clipped hard, to one and the same norm."""
        before, after = seen.grad_norm, seen.grad_norm_clipped
        if before is None or after is None or not before < math.inf or self._warned:
            return ()
        steps = self._steps
        steps.append((before, after if seen.clipped else -1.0, seen.loss))
        self._taken += 1
        if self._taken % _EVERY or len(steps) < (steps.maxlen or 0):
            return ()
        return self._look(seen)

    def _look(self, seen: Observation) -> Iterator[Finding]:
        clipped = [(before, after) for before, after, _ in self._steps if after > 0.0]
        if len(clipped) < self._share * len(self._steps):
            return
        left = sorted([after for _, after in clipped])
        limit = middle(left)
        if not left[-1] - left[0] < _PINNED * limit:
            return
        ratio = middle(sorted([before / after for before, after in clipped]))
        # Once something was said, only a loss that rises under hard clipping is worth another word.
        if ratio >= (max(self._ratio, _HARD) if self._said else self._ratio):
            yield from self._speak(seen, len(clipped), limit, ratio)

    def _speak(self, seen: Observation, clipped: int, limit: float, ratio: float) -> Iterator[Finding]:
        trend = _trend([loss for _, _, loss in self._steps])
        falling, rising = trend > _FALLING, trend < -_RISING
        hard = ratio >= _HARD
        warn = rising and hard if self._said else rising or (hard and not falling)
        severity = Severity.WARNING if warn else Severity.INFO
        if severity in self._said:
            return
        loss = "still falling" if falling else "rising" if rising else "not falling clearly"
        self._said.add(severity)
        self._warned = Severity.WARNING in self._said
        total = len(self._steps)
        yield finding(
            "GG206",
            f"{clipped} of the last {total} steps ({clipped / total:.0%}) were clipped to a norm of {number(limit)}; "
            f"the norm before was {number(ratio)} times that (median), at lr {learning_rates(seen.lr)}. The loss is "
            f"{loss} over these steps.",
            likely=["lr_too_high"] if warn else ["threshold_low"],
            severity=severity,
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}, {severity}",
            evidence={
                "share": clipped / total,
                "window": total,
                "ratio": ratio,
                "clipped_to": limit,
                "lr": list(seen.lr),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain lists of floats and strings."""
        return {"steps": [list(step) for step in self._steps], "said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._steps.clear()
        self._steps.extend((float(before), float(after), loss) for before, after, loss in state["steps"])
        self._taken = len(self._steps)
        self._said = set(state["said"])
        self._warned = Severity.WARNING in self._said


def clearly_falling(losses: Sequence[float | None]) -> bool:
    """Whether the losses have a downward trend beyond chance, by two standard deviations of the Mann-Kendall statistic.

    It counts, over all pairs, how often the later loss is the lower one (Mann, "Nonparametric tests against trend",
    Econometrica 13, 1945): no shape of the curve or of the noise is assumed. Losses that are unknown or not finite are
    left out; with fewer than eight known ones the answer is no.
    """
    return _trend(losses) > _FALLING


def clearly_rising(losses: Sequence[float | None]) -> bool:
    """Whether they have an upward trend, by four standard deviations: a much rarer chance, for a louder word."""
    return _trend(losses) < -_RISING


def _trend(losses: Sequence[float | None]) -> float:
    """The Mann-Kendall statistic in its standard deviations, positive where losses fall; 0 for fewer than eight."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    count = len(known)
    if count < 8:
        return 0.0
    # Each loss against all before it, which are kept in order: a count of pairs one by one takes ten times as long.
    falls = 0
    before: list[float] = []
    for loss in known:
        below = bisect_left(before, loss)
        above = len(before) - bisect_right(before, loss, below)
        falls += above - below
        before.insert(below, loss)
    return falls / math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0)
