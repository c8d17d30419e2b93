"""LoggedLoss: a curve without gaps over steps whose loss was NaN, because the loop filters what it logs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

_NAME = "loss"


class LoggedLoss(Guard):
    """Compares the losses given to `guardian.log()` after a step with the loss that backward() saw in it.

    Speaks where that one was NaN or infinite, and each number logged under a name with "loss" in it is finite: a filter
    or an average hides the step. What is printed or sent elsewhere is not seen. A validation loss that is logged beside
    the training loss is one of these numbers; where either is not finite, nothing is hidden.

    Judges the loss that was read for the step anyway, also of a step that a GradScaler leaves out; reads nothing.
    """

    # A loss that is not finite has its step, and those after it, measured in full.
    late = True

    def __init__(self) -> None:
        self._bad: tuple[int, float] | None = None
        self._known: dict[str, int] = {}

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._bad = None

    def judge(self, seen: Observation) -> Iterator[Finding]:
        if self._bad is not None:
            yield from self._compare()
        if seen.loss is not None and not math.isfinite(seen.loss):
            self._bad = (seen.step, seen.loss)
            self._known = dict(self.watch.times_logged)

    def finish(self) -> Iterator[Finding]:
        if self._bad is not None:
            yield from self._compare()

    def _losses(self) -> dict[str, float]:
        return {name: value for name, value in self.watch.logged.items() if _NAME in name.lower()}

    def _compare(self) -> Iterator[Finding]:
        if self._bad is None:
            return
        (step, loss), self._bad = self._bad, None
        # What stands there from before was logged for another step.
        times, known = self.watch.times_logged, self._known
        new = {name: value for name, value in self._losses().items() if times.get(name) != known.get(name)}
        if not new or not all(math.isfinite(value) for value in new.values()):
            return
        logged = ", ".join(f"{name}={number(value)}" for name, value in new.items())
        evidence: dict[str, Any] = {"logged": dict(new), "loss": loss}
        yield finding(
            "GG111",
            f"After step {step}, {logged} was given to guardian.log(), which is finite; the loss that backward() saw "
            f"in it was {number(loss)}.",
            likely=["filtered"],
            step=step,
            moment=Moment.BEFORE_STEP,
            evidence=evidence,
        )
