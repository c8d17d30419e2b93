"""A schedule that begins again in the middle of a run: a new scheduler stands at its start, and the lr with it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

from gpt_guard.callbacks.schedule.schedulers import SchedulerView, find_schedulers, is_scheduled
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Observation, Severity
from gpt_guard.records.render import learning_rate

# Looking for live schedulers takes some tens of milliseconds.
_MOST_LOOKS = 5
_LEAST_STEPS = 3
_CLOSE = 1e-6


class Restart:
    """Follows the lr of one optimizer: back at that of the first step in one leap, by a new scheduler.

    Warm restarts and cycles go on counting; a lr that is set by hand has no scheduler that stands at its start. One new
    scheduler may be a second phase, and is only worth knowing; a second one from the same start is a warning.
    """

    def __init__(self) -> None:
        self._first: tuple[float, ...] = ()
        self._last: tuple[float, ...] = ()
        self._steps = 0
        self._looks = 0
        self._times = 0

    def judge(self, seen: Observation, optimizer: Optimizer, factor: float) -> Iterator[Finding]:
        """Take in the learning rates of one step."""
        last, self._last = self._last, seen.lr
        self._first = self._first or seen.lr
        self._steps += 1
        if last == seen.lr or self._steps <= _LEAST_STEPS or len(last) != len(seen.lr) or self._looks >= _MOST_LOOKS:
            return
        if not self._back_at_start(last, seen.lr, factor) or not is_scheduled(optimizer):
            return
        self._looks += 1
        for view in find_schedulers([optimizer]):
            if view.last is not None and view.last <= 1 and not view.waits_for_metric:
                self._times += 1
                yield self._finding(seen, view, last)
                return

    def _back_at_start(self, last: tuple[float, ...], now: tuple[float, ...], factor: float) -> bool:
        same = all(abs(one - other) <= _CLOSE * abs(other) for one, other in zip(now, self._first, strict=False))
        leap = any(max(a, b) >= factor * min(a, b) for a, b in zip(last, now, strict=True))
        return same and leap and len(now) == len(self._first)

    def _finding(self, seen: Observation, view: SchedulerView, last: tuple[float, ...]) -> Finding:
        again = "" if self._times == 1 else f", for time {self._times}"
        return finding(
            "GG412",
            f"The learning rate went from {learning_rate(last[0])} to {learning_rate(seen.lr[0])} in one step{again}: "
            f"back to that of the first step. The scheduler that drives this optimizer ({view.name}) stands at "
            f"position {view.last}, after {self._steps} steps.",
            likely=["made_again"],
            severity=Severity.INFO if self._times == 1 else Severity.WARNING,
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}, {'first' if self._times == 1 else 'again'}",
            evidence={"scheduler": view.name, "position": view.last, "before": list(last), "lr": list(seen.lr)},
        )
