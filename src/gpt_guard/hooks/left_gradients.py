"""The gradients as the last backward has left them: which tensors they are, and how often each was written to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

from torch import Tensor

from gpt_guard.hooks.tensors import version_of

_GRAD = attrgetter("grad")
_VERSION = attrgetter("_version")


class LeftGradients:
    """Recognizes them again, and tells whether anything has written to them since; reads no value.

    `kept` are the tensors themselves, held in light steps up to the step or the next forward, also where they are
    cleared meanwhile; else they are only known by their ids. `versions` are their counters.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.versions: list[int] = []
        self._ids: list[int] = []

    def forget(self) -> None:
        """Hold nothing, and recognize nothing."""
        self.kept, self._ids = [], []

    def note(self, grads: Sequence[Tensor]) -> None:
        """Know these by their ids, and hold none."""
        self.kept, self._ids, self.versions = [], list(map(id, grads)), list(map(version_of, grads))

    def release(self) -> None:
        """Know by their ids those that were held."""
        if self.kept:
            self._ids, self.kept = list(map(id, self.kept)), []

    @property
    def ids(self) -> list[int]:
        """The id of each."""
        return self._ids or list(map(id, self.kept))

    def are(self, gradients: Sequence[Tensor]) -> bool:
        """Whether it is exactly these."""
        if self.kept:
            # By identity, and without a number made of each: this runs where nothing of us is in the caches.
            return len(gradients) == len(self.kept) and all(map(is_, gradients, self.kept))
        return list(map(id, gradients)) == self._ids

    def some_of(self, gradients: Iterable[Tensor]) -> bool:
        """Whether any of these is among them."""
        return not set(map(id, gradients)).isdisjoint(self.ids)

    def in_place(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the gradients of these parameters are still they."""
        return bool(self.kept or self._ids) and self.are(list(map(_GRAD, parameters)))

    def unwritten(self) -> bool:
        """Whether nobody has written to those that are held."""
        return list(map(_VERSION, self.kept)) == self.versions

    def writes(self, parameters: Sequence[Tensor]) -> int | None:
        """How often they were written to since, all together; None where they are not in place or do not count."""
        if not self.in_place(parameters):
            return None
        try:
            # Counters only grow: what the sum shows is what each of them does.
            now: int = sum(map(_VERSION, self.kept or map(_GRAD, parameters)))
        except RuntimeError:
            return None
        return now - sum(self.versions)
