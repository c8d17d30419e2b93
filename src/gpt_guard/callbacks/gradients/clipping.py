"""What stands between backward and step: clipping that is on most of the time, and a GradScaler used out of order."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpt_guard.callbacks.gradients.level import middle
from gpt_guard.catalogue import finding
from gpt_guard.hooks.scaler import Misuse
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
# A scale near 1 has nothing to give away.
_LEAST_SCALE = 8.0
_IN_A_ROW = 3
# Clipping a scaled gradient that was small leaves more than the true norm; no healthy loop multiplies it so.
_TOO_LARGE = 4.0


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
        self._reported: set[str] = set()
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
        if ratio >= (max(self._ratio, _HARD) if self._reported else self._ratio):
            yield from self._speak(seen, len(clipped), limit, ratio)

    def _speak(self, seen: Observation, clipped: int, limit: float, ratio: float) -> Iterator[Finding]:
        trend = _trend([loss for _, _, loss in self._steps])
        falling, rising = trend > _FALLING, trend < -_RISING
        hard = ratio >= _HARD
        warn = rising and hard if self._reported else rising or (hard and not falling)
        severity = Severity.WARNING if warn else Severity.INFO
        if severity in self._reported:
            return
        loss = "still falling" if falling else "rising" if rising else "not falling clearly"
        self._reported.add(severity)
        self._warned = Severity.WARNING in self._reported
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
        return {"steps": [list(step) for step in self._steps], "said": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._steps.clear()
        self._steps.extend((float(before), float(after), loss) for before, after, loss in state["steps"])
        self._taken = len(self._steps)
        self._reported = set(state["said"])
        self._warned = Severity.WARNING in self._reported


def clearly_falling(losses: Sequence[float | None]) -> bool:
    """Whether the losses have a downward trend beyond chance, by two standard deviations of the Mann-Kendall statistic.

    It counts, over all pairs, how often the later loss is the lower one (Mann, "Nonparametric tests against trend",
    Econometrica 13, 1945): no shape of the curve or of the noise is assumed. Losses that are unknown or not finite are
    left out; with fewer than eight known ones the answer is no.
    """
    return _trend(losses) > _FALLING


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


_WORDS = {
    Misuse.CLIPPED_SCALED: (
        "GG210",
        "Gradients were clipped to a norm of {scaled} while they were still multiplied by the GradScaler's scale of "
        "{scale}, in three steps in a row: scaler.step() then divided them, and {applied} is applied of a true norm "
        "of {true}.",
        "clip_before_unscale",
    ),
    Misuse.PLAIN_STEP: (
        "GG211",
        "optimizer.step() was called instead of scaler.step(optimizer): the gradients still carry the GradScaler's "
        "scale of {scale}. Their true norm is {true}, the step applies {applied} ({factor} times as much).",
        "plain_step",
    ),
    Misuse.BOTH_STEPS: (
        "GG211",
        "optimizer.step() followed scaler.step(optimizer) on the same gradients (norm {applied}, scale {scale}), for "
        "the third time: each of them is applied twice.",
        "both_steps",
    ),
    Misuse.UNSCALED_LOSS: (
        "GG212",
        "backward() was called on a loss that was not scaled, and scaler.step(optimizer) divided its gradients by the "
        "scale of {scale}: {applied} is applied of a true norm of {true}, in three steps in a row.",
        "unscaled_backward",
    ),
}


class Scaling:
    """Follows one optimizer. `reported` is True once something was told: other words about clipping are then noise.

    Gradients are clipped while scaled if something wrote them before `scaler.step()` without `unscale_()`, and the
    scaled norm is the same in three steps in a row: a division by a count of tokens leaves another one each time.
    """

    def __init__(self) -> None:
        self.reported = False
        self._pinned: list[float] = []
        self._last: Misuse | None = None
        self._streak = 0
        self._twice = 0

    def judge(self, seen: Observation) -> Iterator[Finding]:
        """Yield at most one finding for each kind of misuse; floats only."""
        case = seen.readings.get("scaler.case")
        if case is None:
            self._last, self._streak = None, 0
            self._pinned.clear()
            return
        before, after, scale = seen.grad_norm, seen.grad_norm_clipped, seen.readings.get("scaler.scale")
        if not before or not after or not scale or not before < math.inf or not after < math.inf:
            return
        misuse = Misuse(int(case))
        holds = scale >= _LEAST_SCALE and self._holds(misuse, before, after, scale)
        self._streak = self._streak + 1 if holds and misuse is self._last else int(holds)
        self._last = misuse
        # Between two of these there is always the step of the scaler, which is as it should be.
        self._twice += misuse is Misuse.BOTH_STEPS
        # A whole scale too large is beyond doubt, and the step is not made yet.
        certain = misuse is Misuse.PLAIN_STEP and after > 0.5 * scale * before
        if not self.reported and (max(self._streak, self._twice) >= _IN_A_ROW or (holds and certain)):
            self.reported = True
            yield self._finding(misuse, seen, before, after, scale)

    def _holds(self, misuse: Misuse, before: float, after: float, scale: float) -> bool:
        if misuse is Misuse.CLIPPED_SCALED:
            self._pinned = [*self._pinned[-_IN_A_ROW + 1 :], after * scale]
            middle = self._pinned[-1]
            return after < 0.5 * before and all(abs(each - middle) < _PINNED * middle for each in self._pinned)
        if misuse is Misuse.PLAIN_STEP:
            return after > _TOO_LARGE * before
        if misuse is Misuse.UNSCALED_LOSS:
            return after < 1.05 * before / scale
        return True

    def _finding(self, misuse: Misuse, seen: Observation, before: float, after: float, scale: float) -> Finding:
        code, text, likely = _WORDS[misuse]
        figures = {"true": number(before), "applied": number(after), "scale": number(scale)}
        return finding(
            code,
            text.format(**figures, scaled=number(after * scale), factor=number(after / before)),
            likely=[likely],
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}",
            evidence={"grad_norm": before, "applied": after, "scale": scale},
        )
