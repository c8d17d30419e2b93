"""Does the batch keep its form? Watched by shapes alone, in every step, which reads nothing."""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, ...]

SETTLED = 3
"""Steps of one form, after which another one is a change."""
IN_A_ROW = 3
"""A single small batch is the rest at the end of an epoch; so many in a row are none."""


class Change(NamedTuple):
    """What the batch was like, and what it is now: `squeezed` has lost the batch dimension, `collapsed` its rows."""

    kind: str
    before: Shape
    now: Shape


class BatchShape:
    """The shapes of the main input in training; a change counts once a backward has followed it."""

    def __init__(self) -> None:
        self._usual: Shape | None = None
        self._mixed = False
        self._settled = 0
        self._single = 0
        self._now: Shape | None = None
        self._rows = 0
        self._said: set[str] = set()

    def forward(self, shape: Shape) -> None:
        """The model is called for training."""
        self._now = shape
        self._rows += shape[0] if shape else 1

    def stepped(self) -> None:
        """A step has ended."""
        if self._now is None:
            return
        shape, rows, self._now, self._rows = self._now, self._rows, None, 0
        if self._usual is None:
            self._usual = shape
        if len(shape) == len(self._usual):
            if rows > 1:
                self._usual = shape
            self._settled += rows > 1
            self._single = self._single + 1 if rows == 1 else 0
        elif self._settled < SETTLED:
            # Called with and without a batch dimension from the start: both are meant.
            self._mixed = True

    def backward(self) -> Change | None:
        """What has changed, each kind once; None where nothing has."""
        usual, now = self._usual, self._now
        if usual is None or now is None or self._mixed or self._settled < SETTLED:
            return None
        kind = None
        # The other sizes may be those of a sequence, which vary.
        if len(now) == len(usual) - 1 and len(usual) > 1 and _fits(now, usual[1:]):
            kind = "squeezed"
        elif len(now) == len(usual) and self._single >= IN_A_ROW - 1 and self._rows == 1 and usual[0] > 1:
            kind = "collapsed"
        if kind is None or kind in self._said:
            return None
        self._said.add(kind)
        return Change(kind, usual, now)


def _fits(now: Shape, row: Shape) -> bool:
    """Whether this is one row: of the same sizes, or of another length where it is a sequence alone."""
    return now == row or len(row) == 1
