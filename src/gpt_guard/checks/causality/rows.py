"""Do the rows of a batch know of each other? Asked by changing all other rows, by moving rows, and by gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.perturb import Forward, other_ids
from gpt_guard.hooks.isolation.compare import (
    FirstDifference,
    across_shapes,
    at_row,
    difference,
    everything,
    first_difference,
    rounding,
    traced,
)


class Rows(NamedTuple):
    """The largest change of a row that stayed the same itself. `how` says what was changed around it."""

    how: str
    change: float
    allowed: float
    scale: float
    row: int
    inputs: tuple[Tensor, Tensor] | None

    @property
    def leaks(self) -> bool:
        """True where it is more than rounding."""
        return self.change > self.allowed


def change_rows(forward: Forward, x: Tensor, vocab: int, seed: int, avoid: int | None = None) -> Rows:
    """For each row in turn: all other rows get other tokens, and this row's logits must stay.

    Reads the device. Call it in eval mode and without gradient.
    """
    before = forward(x)
    worst = Rows("others", 0.0, rounding(before), float(before.abs().max()), 0, None)
    generator = torch.Generator().manual_seed(seed)
    for row in range(x.size(0)):
        changed = other_ids(x, vocab, generator, avoid)
        changed[row] = x[row]
        change = float(difference(before[row], forward(changed)[row]).max())
        if change > worst.change:
            worst = worst._replace(change=change, row=row, inputs=(x, changed))
    return worst


def move_rows(forward: Forward, x: Tensor) -> Rows:
    """Each row one place down, the last on top: the logits must move along, whatever kernels make of it in rounding."""
    before = forward(x)
    moved = x.roll(1, 0)
    apart = difference(before, forward(moved).roll(-1, 0)).amax((1, 2))
    scale = float(before.abs().max())
    return Rows("moved", float(apart.max()), across_shapes(before), scale, int(apart.argmax()), (x, moved))


def readers(forward: Forward, x: Tensor, vocab: int, seed: int) -> dict[int, list[int]]:
    """Which row reacts to which others, each of them changed alone."""
    before = forward(x)
    allowed = rounding(before)
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, list[int]] = {}
    for source in range(x.size(0)):
        changed = x.clone()
        changed[source] = other_ids(x[source], vocab, generator)
        apart = difference(before, forward(changed)).amax((1, 2)).tolist()
        for row, change in enumerate(apart):
            if row != source and change > allowed:
                found.setdefault(row, []).append(source)
    return found


def leaking_module(model: nn.Module, forward: Forward, found: Rows) -> FirstDifference | None:
    """The module whose output first changed for the row that did not change itself."""
    if found.inputs is None:
        return None
    rows, length = found.inputs[0].shape
    one = traced(model, lambda: forward(found.inputs[0]) if found.inputs else None)
    other = traced(model, lambda: forward(found.inputs[1]) if found.inputs else None)
    if found.how == "others":
        return first_difference(model, one, other, at_row(rows, length, found.row))
    other = [event._replace(tensors=tuple(_moved_back(tensor, rows) for tensor in event.tensors)) for event in other]
    return first_difference(model, one, other, everything)


def _moved_back(tensor: Tensor, rows: int) -> Tensor:
    """Undo the move, where the tensor has rows in front; what has none (positions, a mask) stays."""
    return tensor.roll(-1, 0) if tensor.dim() >= 2 and tensor.size(0) == rows else tensor
