"""Samples of tensors where a reading is free, kept from step to step: what is seen after one is there before the next.

The first Python line and the first call of torch after a stretch of the model's own work cost far more than the
arithmetic on these few values. So the sample after a step serves as the one before the next, and the figures of
several steps can be worked out at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import mul

import torch
from torch import Tensor

from gpt_guard.callbacks.param_columns import Columns
from gpt_guard.callbacks.param_sample import NARROW, alike, layout, sample_view

# Steps that may wait for their figures, as many as from one full step to the next.
MOST_WAITING = 8


class HostRows:
    """Tensors of one device and dtype, each seen through a view of at most `size` elements; figures are Python floats.

    A view shares its storage with the tensor, so taking the sample is one fused copy. Rows of short tensors end in
    zeros that never change: equally long rows let one reduction serve all of them. Half types are kept in float32.
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor], counts: Sequence[bool], size: int) -> None:
        first, count = tensors[0], len(tensors)
        self.places = places
        self._size = size
        self._count = count
        self._narrow = first.dtype.itemsize < NARROW
        self._like = [layout(tensor) for tensor in tensors]
        self._views = [sample_view(tensor, size) for tensor in tensors]
        self._lengths = [view.numel() for view in self._views]
        dtype = torch.float64 if first.dtype is torch.float64 else torch.float32
        # The first two take turns from step to step; the others are for steps that wait.
        self._all = torch.zeros((MOST_WAITING + 2, count, size), dtype=dtype, device=first.device)
        self._slots = list(self._all.unbind(0))
        self._rows: list[list[Tensor]] = [[] for _ in self._slots]
        self._two = self._all[:2]
        self._at = 0
        self._held: list[float] | None = None
        # torch writes its results where Python reads them: a list of this costs a fifth of `Tensor.tolist()`.
        self._values = array("d" if dtype is torch.float64 else "f", bytes((2 * count + 1) * dtype.itemsize))
        vector = torch.frombuffer(self._values, dtype=dtype)
        self._norms, self._largest = vector[:-1].view(2, -1), vector[-1]
        self._scales = [
            math.sqrt(tensor.numel() / length) if counted else 0.0
            for tensor, length, counted in zip(tensors, self._lengths, counts, strict=True)
        ]
        self._counted: list[int] | None = None

    def _row(self, slot: int) -> list[Tensor]:
        if not self._rows[slot]:
            self._rows[slot] = [
                row[:length] for row, length in zip(self._slots[slot].unbind(0), self._lengths, strict=True)
            ]
        return self._rows[slot]

    def rebind(self, tensors: Sequence[Tensor | None]) -> bool:
        """Look at the same tensors in new storage; False if they are not laid out as before."""
        mine = alike(self._like, [tensors[place] for place in self.places])
        if mine is not None:
            self._views = [sample_view(tensor, self._size) for tensor in mine]
        return mine is not None

    def take(self, *, known: bool) -> bool:
        """Remember the values before a step, while no step waits; False if they were `known` and are others now."""
        other = 1 - self._at
        torch._foreach_copy_(self._row(other), self._views)
        if known and torch.equal(self._slots[other], self._slots[self._at]):
            return True
        self._at, self._held = other, None
        return not known

    def note(self, *, later: bool) -> None:
        """Remember the values after a step; `later`: beside those of steps that wait for their figures."""
        to = self._at + 1 if later else 1 - self._at
        torch._foreach_copy_(self._row(to), self._views)
        self._at = to

    def figures(self, waiting: int, *, keep: bool) -> list[Columns]:
        """What each of so many steps did; `keep` tells whether the last values will serve before the next step."""
        after = self._at
        if waiting == 1 and after < 2:
            return [self._one(1 - after, after, keep=keep)]
        run = self._all[after - waiting : after + 1]
        changes = run[1:] - run[:-1]
        norms: list[list[float]] = torch.linalg.vector_norm(changes, 2, 2).tolist()
        held: list[list[float]] = torch.linalg.vector_norm(run, 2, 2).tolist()
        # The maximum norm of rows takes eight times as long as this.
        largest: list[float] = changes.abs_().amax((1, 2)).tolist()
        found = [self._columns(*row) for row in zip(norms, held, changes.unbind(0), largest, strict=False)]
        self._slots[0].copy_(self._slots[after])
        self._at, self._held = 0, held[-1]
        return found

    def _one(self, before: int, after: int, *, keep: bool) -> Columns:
        slots, count = self._slots, self._count
        if keep and self._held is None:
            torch.linalg.vector_norm(slots[before], 2, 1, out=self._norms[0])
            self._held = self._values[:count].tolist()
        # In place of what is not needed again; the sign of a change doesn't matter to its norm.
        place, other = (before, after) if keep else (after, before)
        change = slots[place].sub_(slots[other])
        torch.linalg.vector_norm(self._two, 2, 2, out=self._norms)
        torch.linalg.vector_norm(change, math.inf, out=self._largest)
        values = self._values.tolist()
        norms = values[:count], values[count:-1]
        held, self._held = (self._held, norms[other]) if keep else (norms[other], None)
        assert held is not None
        return self._columns(norms[place], held, change, values[-1])

    def _columns(self, norm: list[float], held: list[float], change: Tensor, largest: float) -> Columns:
        if self._counted is None:
            # A matrix that starts at zero (an adapter's second half, a zero-initialised projection) has no ratio yet.
            self._counted = [place for place, scale in enumerate(self._scales) if scale and held[place] > 0.0]
            self._scales = [self._scales[place] for place in self._counted]
        share = norm
        if self._narrow:
            moved = torch.count_nonzero(change, dim=1).tolist()
            share = [number / length for number, length in zip(moved, self._lengths, strict=True)]
        # A few products cost less here than in two more calls of torch.
        counted, scales = self._counted, self._scales
        total = math.hypot(*map(mul, map(norm.__getitem__, counted), scales))
        weight = math.hypot(*map(mul, map(held.__getitem__, counted), scales))
        return Columns(norm, held, share, total, weight, largest)
