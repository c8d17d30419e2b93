"""A GradScaler that is used out of order: suspected from the calls, decided by the norms before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpt_guard.catalogue import finding
from gpt_guard.hooks.scaler_use import Misuse
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

# A scale near 1 has nothing to give away.
_LEAST_SCALE = 8.0
_IN_A_ROW = 3
# What clip_grad_norm_ leaves is the same norm each time, to rounding.
_PINNED = 0.01
# Clipping a scaled gradient that was small leaves more than the true norm; no healthy loop multiplies it so.
_TOO_LARGE = 4.0


class Scaling:
    """Follows one optimizer. `told` is True once something was said: other words about clipping are then noise.

    Gradients are clipped while scaled if something wrote them before `scaler.step()` without `unscale_()`, and the
    scaled norm is the same in three steps in a row: a division by a count of tokens leaves another one each time.
    """

    def __init__(self) -> None:
        self.told = False
        self._pinned: list[float] = []
        self._last: Misuse | None = None
        self._streak = 0
        self._twice = 0

    def concerns(self, seen: Observation) -> bool:
        """Whether there is anything to judge, or to forget since the last time there was."""
        return self._last is not None or "scaler.case" in seen.readings

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
        if not self.told and (max(self._streak, self._twice) >= _IN_A_ROW or (holds and certain)):
            self.told = True
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
