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
    """How often each parameter was written to, before and after each of the newest steps.

    Host work only. A write through `.data` or numpy is not counted by torch, and not seen here.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._tensors = list(parameters.values())
        self._places = {name: place for place, name in enumerate(parameters)}
        self._after = self._now()
        # Of the newest steps: which it was, the counters before it, and those that the one before had left.
        self._steps: deque[tuple[Step, list[int], list[int]]] = deque(maxlen=_KEPT)

    def _now(self) -> list[int]:
        try:
            return list(map(_VERSION, self._tensors))
        except RuntimeError:
            # Inference tensors do not count.
            return [version_of(tensor) for tensor in self._tensors]

    def step_begins(self, step: Step) -> None:
        """Note the counters before a step."""
        self._steps.append((step, self._now(), self._after))

    def step_ended(self) -> None:
        """Note the counters that the step has left."""
        self._after = self._now()

    def written_between(self, name: str, step: Step) -> bool:
        """Whether something wrote to a parameter between this step and the one before it; False if not known."""
        place = self._places.get(name)
        if place is None:
            return False
        return any(before[place] != last[place] for each, before, last in self._steps if each == step)
