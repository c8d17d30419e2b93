"""Norms of the same few gradients in each step: those of one small shape are rows of one tensor, reduced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gpt_guard.hooks.gradients import without_graph

# Joining a few, or large ones, costs more than reducing each by itself.
_LEAST_ROWS = 4
_MOST_ELEMENTS = 1024


class RowNorms:
    """L2 norms of ordinary gradients of these shapes, as floats in their order; for where a reading is free.

    A model has many vectors of its width: biases, and the scales of norms. A reduction of each takes about two
    microseconds, whatever its length.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        shapes: dict[torch.Size, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if 0 < tensor.numel() <= _MOST_ELEMENTS:
                shapes.setdefault(tensor.shape, []).append(place)
        rows = max(shapes.values(), key=len, default=[])
        rows = rows if len(rows) >= _LEAST_ROWS else []
        rest = [place for place in range(len(tensors)) if place not in set(rows)]
        self._rows, self._rest = _taking(rows), _taking(rest)
        found = [*rows, *rest]
        self._in_order = _taking([found.index(place) for place in range(len(found))])

    def measure(self, gradients: list[Tensor]) -> list[float]:
        """The norms. Raises TypeError or RuntimeError where one is missing, or is of another shape or kind."""
        with_rows = self._rows(gradients)
        return self._in_order(without_graph(self._measure, with_rows, self._rest(gradients)))

    def _measure(self, rows: list[Tensor], rest: list[Tensor]) -> list[float]:
        norms: list[float] = _rows_of(rows) if rows else []
        if rest:
            norms += [norm.item() for norm in torch._foreach_norm(rest, 2.0)]
        return norms


def _taking(places: list[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that takes these places of a list."""
    if len(places) < 2:
        return lambda values: [values[place] for place in places]
    take = itemgetter(*places)
    return lambda values: list(take(values))


def _rows_of(rows: list[Tensor]) -> list[float]:
    norms: list[float] = torch.linalg.vector_norm(torch.stack(rows).view(len(rows), -1), 2, 1).tolist()
    return norms
