"""The figures of one measured step on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Columns:
    """What each of some tensors did in a step, in their order, and all of them together.

    `norm` is that of the change, `before` that of the values before; `share` the share of elements that changed, known
    for half types only and elsewhere the same as `norm`: there it only matters whether it is zero. `least` is the
    smallest share. `moved` and `held` are the norms of change and values before over all that counts, `ratio` is the
    overall update-to-weight ratio, NaN where nothing counts; `largest` the largest absolute change.
    """

    __slots__ = ("before", "held", "largest", "least", "moved", "norm", "ratio", "share")

    def __init__(
        self,
        norm: Sequence[float],
        before: Sequence[float],
        share: Sequence[float],
        moved: float,
        held: float,
        largest: float,
    ) -> None:
        self.norm = norm
        self.before = before
        self.share = share
        self.least = min(share)
        self.moved = moved
        self.held = held
        self.largest = largest
        self.ratio = moved / held if held > 0.0 else math.nan

    def ratios(self) -> list[float]:
        """The ratio of each tensor; infinite for what was zero before and moved."""
        rows = zip(self.norm, self.before, strict=True)
        return [norm / weight if weight > 0.0 else math.inf if norm else 0.0 for norm, weight in rows]


def unpack(vector: Sequence[float], count: int) -> Columns:
    """The figures of so many tensors from the vector of a `Change`."""
    values = list(vector)
    norm, share = values[:count], values[2 * count : -3]
    return Columns(norm, values[count : 2 * count], share or norm, *values[-3:])


def join(parts: Sequence[tuple[Sequence[int], Columns]]) -> Columns:
    """The figures of several groups as those of one; each comes with the places of its tensors."""
    if len(parts) == 1:
        # The usual case, a step of one dtype on one device: nothing to join.
        return parts[0][1]
    count = sum(len(places) for places, _ in parts)
    norm, before, share = [0.0] * count, [0.0] * count, [0.0] * count
    for places, columns in parts:
        for place, *row in zip(places, columns.norm, columns.before, columns.share, strict=True):
            norm[place], before[place], share[place] = row
    each = [columns for _, columns in parts]
    moved, held = math.hypot(*[one.moved for one in each]), math.hypot(*[one.held for one in each])
    return Columns(norm, before, share, moved, held, max([one.largest for one in each]))
