"""What FiniteGuard remembers of a run: masks, where the loss was going, what it has reported of this step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpt_guard.callbacks.finite.first_seen import Shown
from gpt_guard.callbacks.finite.forward_findings import mask_seen, scaler_stuck
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

# A loss that has grown tenfold within the last few steps has run away: the non-finite value is its end, not its cause.
_RECENT = 6
_RUN_AWAY = 10.0
# From its default scale of 65536 a healthy GradScaler is at 1 after 16 skips; a few more and nothing helps.
_STUCK_SCALER = 20


class Context:
    """Masks and losses of one run."""

    def __init__(self) -> None:
        self._masks: set[int] = set()
        self._skipped = 0
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def note_mask(self, watch: Watch, index: int, shown: Shown, here: dict[str, Any]) -> None:
        """Record that a module returned -inf; the first is told, later ones are the same mask or the same trouble."""
        if not self._masks:
            watch.submit(mask_seen(watch, index, shown, here))
        self._masks.add(index)

    def mask_names(self, watch: Watch) -> list[str]:
        """The modules that have returned -inf."""
        return [watch.tap.names[index] for index in sorted(self._masks)]

    def note_step(self, watch: Watch, seen: Observation) -> Iterator[Finding]:
        """Keep the loss of a step; count those that a GradScaler skips one after the other."""
        self._skipped = self._skipped + 1 if seen.skipped else 0
        if self._skipped == _STUCK_SCALER:
            yield scaler_stuck(watch, self._skipped)
        if seen.skipped:
            return
        if seen.loss is not None and math.isfinite(seen.loss):
            self._losses.append(seen.loss)

    @property
    def diverging(self) -> bool:
        """Whether the loss had run away before it, or anything else, became non-finite."""
        return len(self._losses) > 1 and self._losses[-1] > _RUN_AWAY * min(self._losses) > 0.0


class Reported:
    """`forward` and `step` tell that the current forward or step went bad; `after`, that what is bad after it follows.

    A halt ends all of that: if the loop catches it and goes on with another batch, nothing of this one is left.
    """

    def __init__(self) -> None:
        self.halted = False
        self.clear()

    def clear(self) -> None:
        """Nothing has been told."""
        self.forward = self.step = self.after = False
        self._telling = False

    def begin(self) -> None:
        """A forward or a backward begins: where one of the last findings has halted, the loop has gone on."""
        self.halted = False
        if self._telling:
            self.clear()

    @property
    def stopped(self) -> bool:
        """Whether one of the last findings has halted, and the loop has not gone on since."""
        return self.halted or self._telling

    def submit(self, submit: Callable[[Finding], None], found: Finding) -> None:
        """Hand a finding on, which may halt."""
        try:
            submit(found)
        except BaseException:
            self.clear()
            self.halted = True
            raise

    def each(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """The findings of an observation, which whoever asks for them hands on."""
        self._telling = True
        yield from findings
        self._telling = False
