"""Samples of tensors where a reading is free, kept from step to step: what is seen after one is there before the next.

The first Python line and the first call of torch after a stretch of the model's own work cost far more than the
arithmetic on these few values. So the sample after a step serves as the one before the next, and the figures of
several steps can be worked out at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import compress
from operator import mul

import torch
from torch import Tensor

from gpt_guard.callbacks.updates.param_columns import Columns
from gpt_guard.callbacks.updates.param_sample import NARROW, alike, layout, sample_view
from gpt_guard.hooks.pace import Pace

# Steps that may wait for their figures: the light ones from one full step to the next.
MOST_WAITING = Pace.every - 1


class _Run:
    """Views for the figures of so many steps that wait, up to slot `after`: made once, since calls of torch are dear.

    What the steps changed is put behind the values, so that one reduction serves both.
    """

    def __init__(self, slots: Tensor, after: int, waiting: int) -> None:
        first, count = after - waiting, slots.shape[1]
        self._before, self._after = slots[first:after], slots[first + 1 : after + 1]
        self._both = slots[first : after + 1 + waiting]
        self._change = slots[after + 1 : after + 1 + waiting]
        self.changes = self._change.unbind(0)
        rows = 2 * waiting + 1
        self._values, vector = _shared(rows * count + waiting, slots.dtype)
        self._norms, self._largest = vector[: rows * count].view(rows, count), vector[rows * count :]
        self._parts = [slice(row * count, (row + 1) * count) for row in range(rows)]

    def read(self) -> tuple[list[Sequence[float]], Sequence[float]]:
        """The norms of all values, oldest first, then those of each change; the largest element of each change."""
        torch.sub(self._after, self._before, out=self._change)
        torch.linalg.vector_norm(self._both, 2, 2, out=self._norms)
        # The maximum norm of rows takes eight times as long as this.
        torch.amax(self._change.abs_(), (1, 2), out=self._largest)
        return [self._values[part] for part in self._parts], self._values[self._parts[-1].stop :]


def _shared(count: int, dtype: torch.dtype) -> tuple[array[float], Tensor]:
    """So many numbers that torch writes and Python reads: floats are made of those only that somebody asks for."""
    values = array("d" if dtype is torch.float64 else "f", bytes(count * dtype.itemsize))
    return values, torch.frombuffer(values, dtype=dtype)


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
        # The first two take turns from step to step; the next are for steps that wait, the last for what they changed.
        self._all = torch.zeros((2 * MOST_WAITING + 2, count, size), dtype=dtype, device=first.device)
        self._slots = list(self._all.unbind(0))
        self._rows: list[list[Tensor]] = [[] for _ in self._slots]
        self._two = self._all[:2]
        self._at = 0
        self._held: Sequence[float] | None = None
        self._values, vector = _shared(2 * count + 1, dtype)
        self._norms, self._largest = vector[:-1].view(2, -1), vector[-1]
        self._runs: dict[tuple[int, int], _Run] = {}
        self._scales = [
            math.sqrt(tensor.numel() / length) if counted else 0.0
            for tensor, length, counted in zip(tensors, self._lengths, counts, strict=True)
        ]
        self._counted: list[bool] | None = None

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
        torch._foreach_copy_(self._rows[to] or self._row(to), self._views)
        self._at = to

    def figures(self, waiting: int, *, keep: bool) -> list[Columns]:
        """What each of so many steps did; `keep` tells whether the last values will serve before the next step."""
        after = self._at
        if waiting == 1 and after < 2:
            return [self._one(1 - after, after, keep=keep)]
        run = self._runs.get((after, waiting))
        if run is None:
            run = self._runs[after, waiting] = _Run(self._all, after, waiting)
        norms, largest = run.read()
        found = [
            self._columns(norms[waiting + 1 + step], norms[step], run.changes[step], largest[step])
            for step in range(waiting)
        ]
        self._slots[0].copy_(self._slots[after])
        self._at, self._held = 0, norms[waiting]
        return found

    def _one(self, before: int, after: int, *, keep: bool) -> Columns:
        slots, count = self._slots, self._count
        if keep and self._held is None:
            torch.linalg.vector_norm(slots[before], 2, 1, out=self._norms[0])
            self._held = self._values[:count]
        # In place of what is not needed again; the sign of a change doesn't matter to its norm.
        place, other = (before, after) if keep else (after, before)
        change = slots[place].sub_(slots[other])
        torch.linalg.vector_norm(self._two, 2, 2, out=self._norms)
        torch.linalg.vector_norm(change, math.inf, out=self._largest)
        values = self._values
        norms = values[:count], values[count:-1]
        held, self._held = (self._held, norms[other]) if keep else (norms[other], None)
        assert held is not None
        return self._columns(norms[place], held, change, values[-1])

    def _columns(self, norm: Sequence[float], held: Sequence[float], change: Tensor, largest: float) -> Columns:
        if self._counted is None:
            # A matrix that starts at zero (an adapter's second half, a zero-initialised projection) has no ratio yet.
            self._counted = [bool(scale) and value > 0.0 for scale, value in zip(self._scales, held, strict=True)]
            self._scales = list(compress(self._scales, self._counted))
        share = norm
        if self._narrow:
            moved = torch.count_nonzero(change, dim=1).tolist()
            share = [number / length for number, length in zip(moved, self._lengths, strict=True)]
        # A few products cost less here than in two more calls of torch.
        counted, scales = self._counted, self._scales
        total = math.hypot(*map(mul, compress(norm, counted), scales))
        weight = math.hypot(*map(mul, compress(held, counted), scales))
        return Columns(norm, held, share, total, weight, largest)
