"""What FiniteGuard remembers of a run to judge what goes bad in it: masks it has seen, and where the loss was going."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from gpt_guard.callbacks.blame import Shown
from gpt_guard.callbacks.finite_words import mask_seen
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation

# A loss that has grown tenfold within the last few steps has run away: the non-finite value is its end, not its cause.
_RECENT = 6
_RUN_AWAY = 10.0


class Context:
    """Masks and losses of one run."""

    def __init__(self) -> None:
        self._masks: set[int] = set()
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def note_mask(self, watch: Watch, index: int, shown: Shown, here: dict[str, Any]) -> None:
        """Record that a module returned -inf; the first is told, later ones are the same mask or the same trouble."""
        if not self._masks:
            watch.submit(mask_seen(watch, index, shown, here))
        self._masks.add(index)

    def mask_names(self, watch: Watch) -> list[str]:
        """The modules that have returned -inf."""
        return [watch.tap.names[index] for index in sorted(self._masks)]

    def note_loss(self, seen: Observation) -> None:
        """Keep the loss of a step."""
        if seen.loss is not None and math.isfinite(seen.loss):
            self._losses.append(seen.loss)

    @property
    def diverging(self) -> bool:
        """Whether the loss had run away before it, or anything else, became non-finite."""
        return len(self._losses) > 1 and self._losses[-1] > _RUN_AWAY * min(self._losses) > 0.0
