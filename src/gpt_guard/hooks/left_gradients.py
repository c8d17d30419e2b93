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

    `kept` are the tensors themselves, held as long as they are waited for, also where they are cleared meanwhile; else
    they are only known by their `ids`. `versions` are their counters.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.ids: list[int] = []
        self.versions: list[int] = []

    def note(self, grads: Sequence[Tensor], versions: list[int] | None = None) -> None:
        """Know these by their ids, and hold none; `versions` are their counters, where they are at hand."""
        self.kept, self.ids = [], list(map(id, grads))
        self.versions = list(map(version_of, grads)) if versions is None else versions

    def release(self) -> None:
        """Know by their ids those that were held."""
        if self.kept:
            self.ids, self.kept = list(map(id, self.kept)), []

    def are(self, gradients: Sequence[Tensor]) -> bool:
        """Whether it is exactly these."""
        if self.kept:
            # By identity, and without a number made of each: this runs where nothing of us is in the caches.
            return len(gradients) == len(self.kept) and all(map(is_, gradients, self.kept))
        return list(map(id, gradients)) == self.ids

    def some_of(self, gradients: Iterable[Tensor]) -> bool:
        """Whether any of these is among them."""
        return not set(map(id, gradients)).isdisjoint(self.ids or map(id, self.kept))

    def in_place(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the gradients of these parameters are still they."""
        return bool(self.kept or self.ids) and self.are(list(map(_GRAD, parameters)))

    def unwritten(self) -> bool:
        """Whether nobody has written to those that are held."""
        return list(map(_VERSION, self.kept)) == self.versions

    def writes(self, parameters: Sequence[Tensor]) -> int | None:
        """How often they were written to since, all together; None where they are not in place or do not count."""
        grads = list(map(_GRAD, parameters))
        if self.kept:
            self.release()
        if not grads or list(map(id, grads)) != self.ids:
            return None
        try:
            # Counters only grow: what the sum shows is what each of them does.
            now: int = sum(map(_VERSION, grads))
        except RuntimeError:
            return None
        return now - sum(self.versions)
