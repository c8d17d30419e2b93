"""Version counters of the parameters, noted before and after each step for whoever asks what wrote to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from operator import attrgetter

from torch import Tensor

from gpt_guard.hooks.tensors import version_of

# Number of the optimizer, and of its step.
Step = tuple[int, int]
# Where readings wait, a step is judged when the next one of its optimizer has begun.
_KEPT = 8
_VERSION = attrgetter("_version")


class ParameterVersions:
    """How often each parameter was written to: `before` the newest step, and `after` it.

    Host work only. A write through `.data` or numpy is not counted by torch, and not seen here.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.tensors = list(parameters.values())
        self._places = {name: place for place, name in enumerate(parameters)}
        self.before = self.after = self.now()
        # Of the newest steps: which it was, the counters before it, and those that the one before had left.
        self._steps: deque[tuple[Step, list[int], list[int]]] = deque(maxlen=_KEPT)

    def now(self) -> list[int]:
        """The counters now; -1 for what does not count."""
        try:
            return list(map(_VERSION, self.tensors))
        except RuntimeError:
            # Inference tensors do not.
            return [version_of(tensor) for tensor in self.tensors]

    def step_begins(self, step: Step) -> bool:
        """Note the counters; True if something has written to a parameter since the last step."""
        try:
            # As `now`: a call less, here and below.
            self.before = list(map(_VERSION, self.tensors))
        except RuntimeError:
            self.before = self.now()
        self._steps.append((step, self.before, self.after))
        return self.before != self.after

    def step_ended(self) -> None:
        """Note the counters that the step has left."""
        try:
            self.after = list(map(_VERSION, self.tensors))
        except RuntimeError:
            self.after = self.now()

    def written_between(self, name: str, step: Step) -> bool:
        """Whether something wrote to a parameter between this step and the one before it; False if not known."""
        place = self._places.get(name)
        if place is None:
            return False
        return any(before[place] != last[place] for each, before, last in self._steps if each == step)

    def as_often(self, name: str) -> bool:
        """Whether the newest step has written to a parameter as often as the one before; True if not known."""
        place = self._places.get(name)
        if place is None or len(self._steps) < 2:
            return True
        (_, earlier, _), (_, _, left) = self._steps[-2], self._steps[-1]
        return self.after[place] - self.before[place] == left[place] - earlier[place]

    def written_since(self, name: str) -> bool:
        """Whether something has written to a parameter since the newest step."""
        place = self._places.get(name)
        return place is not None and version_of(self.tensors[place]) != self.after[place]
