"""What DataWatch keeps of a forward: hashes and a few figures, measured on the device, compared on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.data.inputs import Inputs
from gpt_guard.callbacks.data.loaders import LoaderUse
from gpt_guard.callbacks.data.row_hashes import LONGEST_ROW, MIN_ELEMENTS, constant, folded, row_hashes
from gpt_guard.records import SourceLine

MOST_ROWS = 4096
"""Rows of a batch whose hashes are kept one by one; a batch of more (the nodes of a graph) is known as a whole."""
MOST_ELEMENTS = 2**20
"""After the inspected steps a larger batch is no longer hashed: on a CPU that would take some milliseconds a step."""
FEWEST_FRACTIONS = 4
SKETCH_ROWS, SKETCH_COLUMNS = 8, 32
SAMPLE = 256


@dataclass
class Forward:
    """One call of the model. `group` is the step that it belongs to; `digest` and what follows come from the host read.

    `held`: the data lay in the same memory, unchanged, as in a call of the step before. `constant`: each of the inputs
    consists of one value. `hashes` are those of the rows, empty where there are too many.
    """

    group: int
    evaluation: bool = False
    inspected: bool = False
    shape: tuple[int, ...] = ()
    numel: int = 0
    floats: bool = False
    names: tuple[str, ...] = ()
    held: bool = False
    expanded: bool = False
    loader: LoaderUse | None = None
    line: SourceLine | None = None
    digest: int | None = None
    targets: list[int] = field(default_factory=list)
    constant: bool = False
    hashes: list[int] = field(default_factory=list)
    look: list[float] = field(default_factory=list)
    columns: list[float] = field(default_factory=list)
    sketch: list[float] = field(default_factory=list)
    target_sample: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of the main input."""
        return self.shape[0] if self.shape else 1

    @property
    def telling(self) -> bool:
        """Whether equal data can be no chance."""
        return self.digest is not None and not self.constant and self.numel >= MIN_ELEMENTS

    @property
    def telling_rows(self) -> bool:
        """Whether equal rows can be no chance: no four fractions are equal by chance, a few ids may be."""
        least = FEWEST_FRACTIONS if self.floats else MIN_ELEMENTS
        return bool(self.hashes) and self.numel // self.rows >= least and not self.constant

    @property
    def whole(self) -> bool | None:
        """Whether the main input consists of whole numbers; None where that was not looked at."""
        return bool(self.look[2]) if self.look else None

    @property
    def one_row(self) -> bool:
        """Whether the batch is one row over and over."""
        return self.rows > 2 and self.telling and len(self.hashes) > 2 and len(set(self.hashes)) == 1

    def take(self, name: str, value: Any) -> None:
        """Fill in what was measured under a name."""
        if name == "hash":
            self.digest, constant_data, *self.hashes = value
            self.constant = bool(constant_data)
        elif name == "targets":
            self.targets += value
        else:
            setattr(self, name, value)


def size(inputs: Inputs) -> int:
    """Elements that a hash would look at."""
    return sum(
        min(tensor.numel(), LONGEST_ROW * max(1, tensor.shape[0])) for tensor in inputs.data.values() if tensor.dim()
    )


def hashed(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The hash of the data, whether all of it is constant, the hashes of its rows; and that of the targets."""
    first = inputs.first
    if first is None:
        return
    rows: Tensor | None = None
    rest: list[Tensor] = []
    constants: list[Tensor] = []
    for tensor in inputs.data.values():
        # What lies elsewhere (lengths on the CPU) could only be joined by waiting for the device.
        if tensor.device != first.device:
            continue
        hashes = row_hashes(tensor)
        constants.append(constant(tensor))
        if tensor.dim() and tensor.shape[0] == first.shape[0]:
            rows = hashes if rows is None else rows * 3 ^ hashes
        else:
            rest.append(folded(hashes))
    assert rows is not None, "the first tensor has rows"
    digest = folded(torch.cat([rows, *(each.reshape(1) for each in rest)]))
    kept = rows if rows.numel() <= MOST_ROWS else rows[:0]
    yield "hash", torch.cat([digest.reshape(1), torch.stack(constants).all().long().reshape(1), kept])
    ours = [folded(row_hashes(each)) for each in inputs.targets.values() if each.device == first.device]
    if ours:
        yield "targets", torch.stack(ours)
        yield "target_sample", sample(next(iter(inputs.targets.values())))


def looked_at(first: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Figures of the main input, for inspected steps: extremes, whether all is whole numbers, share of padding.

    `sketch` holds a few elements of a few rows, in reading order; `columns` of a table `[B, F]` the value of each
    constant column, and NaN for the others.
    """
    values = first.detach()
    if values.is_complex():
        return
    floats = values.is_floating_point()
    flat = values.reshape(values.shape[0], -1)
    whole = (flat == flat.round()).all() if floats else torch.ones((), device=flat.device)
    yield "look", torch.stack([flat.min().float(), flat.max().float(), whole.float(), _padding(flat, floats).float()])
    down, across = max(1, flat.shape[0] // SKETCH_ROWS), max(1, flat.shape[1] // SKETCH_COLUMNS)
    yield "sketch", flat[::down, ::across][:SKETCH_ROWS, :SKETCH_COLUMNS].float().flatten()
    if floats and values.dim() == 2 and values.shape[0] > 2 and values.shape[1] <= SAMPLE:
        same = (flat == flat[:1]).all(0)
        yield "columns", torch.where(same, flat[0].float(), torch.nan)


def sample(target: Tensor) -> Tensor:
    """The first elements of a target."""
    flat = target.detach().reshape(-1)[:SAMPLE]
    return (flat.real if flat.is_complex() else flat).float()


def _padding(ids: Tensor, floats: bool) -> Tensor:
    """The share of elements in runs of the row's last id at its end, of two or more: what padding looks like."""
    if floats or ids.shape[1] < MIN_ELEMENTS:
        return torch.zeros((), device=ids.device)
    same = (ids == ids[:, -1:]).flip(1).long().cumprod(1).sum(1)
    return torch.where(same > 1, same, 0).sum() / ids.numel()
