"""Pace: which steps are measured in full, and which only where something could have changed."""

from __future__ import annotations

from typing import ClassVar


class Pace:
    """Full steps first, then one in sixteen; `full` tells which kind the step being prepared is.

    Some of what is measured repeats what version counters and calls have told already: the gradient norms just before
    a step that nothing or only `clip_grad_norm_` came before, the weights before a step when nobody has written to
    them since the last. Counters miss a write through `.data` or numpy. So everything is measured in the first twenty
    steps, as many as GradNormMonitor wants before it calls a norm unusual; where a counter has missed something in
    them, all steps stay full. Wherever anything else is unusual, `doubt()` has everything measured for as long again.

    Not for runs in which a reading is not free: there everything is measured in each step, and read late.
    """

    first: ClassVar[int] = 20
    every: ClassVar[int] = 16

    def __init__(self, *, light: bool) -> None:
        self.full = True
        self._light = light
        self._left = self.first
        self._since = 0

    def doubt(self, steps: int | None = None) -> None:
        """Measure everything from now on, in at least so many steps; as many as at the start where None."""
        self.full = True
        self._left = max(self._left, self.first if steps is None else steps)

    def never_light(self) -> None:
        """Measure everything in every step of this stretch: a write was seen that no counter shows."""
        self.full, self._light = True, False

    def step_ended(self) -> None:
        """Decide for the step that comes."""
        if not self._light:
            return
        if self._left > 0:
            self._left -= 1
            self._since = 0
        self._since += 1
        self.full = self._left > 0 or self._since >= self.every
        if self.full:
            self._since = 0
