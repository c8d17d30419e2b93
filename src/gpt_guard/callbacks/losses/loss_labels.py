"""Which targets of the inspected steps count: none, hardly any, or padding as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.losses.loss_calls import ClassIds, Seen, Told
from gpt_guard.callbacks.losses.loss_pairing import Grid
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Severity

_IGNORED = -100
HARDLY_ANY = 0.01
"""Where rows are unknown, less is said. Answers after long prompts are a few percent of all positions."""
_LENGTHS = 3
_SHOWN = 16
MIN_PADDING = 4
"""Equal ids at the end of a row that count as padding, as in preflight."""
PADDING_SHARE = 0.01
"""Of the targets that count; less is the end of sequence, or a row or two."""


@dataclass
class Count:
    """Targets that count, of how many, over all calls from one line; rows that have one, of how many known."""

    counted: int = 0
    total: int = 0
    rows: int = 0
    of_rows: int = 0
    ignore_index: int = -100

    def add(self, known: ClassIds, shape: tuple[int, int] | None) -> None:
        """Take one call more. Reads the targets."""
        counts = known.counted
        self.counted += int(counts.sum())
        self.total += counts.numel()
        self.ignore_index = known.ignore_index
        if shape is not None and shape[0] * shape[1] == counts.numel():
            self.rows += int(counts.reshape(shape).any(1).sum())
            self.of_rows += shape[0]


def none_counts(known: ClassIds, reduction: str, seen: Seen) -> Iterator[Told]:
    """The mean of no targets is 0/0. A sum over none is 0, as an empty micro-batch may be."""
    if reduction != "mean" or bool(known.counted.any()):
        return
    total, shape = known.targets.numel(), seen.shape_of(known.targets)
    rows = f" in all {shape[0]} rows" if shape is not None else ""
    text = f"0 of {total} targets count, all are {known.ignore_index}{rows}: the mean over them is 0/0, which is NaN."
    if seen.ids:
        # Where the marker of an answer was looked for, and not found.
        first = ", ".join(str(each) for each in seen.ids[0].ids[0, :_SHOWN].tolist())
        text += f" Row 0 of the inputs begins with {first}."
    yield Told("GG606", text, ("marker",), evidence={"targets": 0, "of": total, "ignore_index": known.ignore_index})


def hardly_any(count: Count) -> Iterator[Told]:
    """GG606 over all inspected steps, by the bounds of preflight where rows are known."""
    if count.total == 0 or count.counted == count.total:
        return
    few_rows = count.of_rows > 0 and (count.counted < count.of_rows or 2 * count.rows < count.of_rows)
    few = count.of_rows == 0 and count.counted < HARDLY_ANY * count.total
    if count.counted and not few and not few_rows:
        return
    seen = f"{count.counted} of {count.total} targets count, the rest is {count.ignore_index}"
    if count.of_rows:
        seen += f"; {count.of_rows - count.rows} of {count.of_rows} rows have none"
    fails = count.counted == 0 or (count.of_rows > 0 and count.counted < count.of_rows)
    likely = ("marker", "truncated") if fails else ("truncated", "marker")
    evidence = {"targets": count.counted, "of": count.total, "rows": count.rows, "of_rows": count.of_rows}
    yield Told("GG606", seen + ".", likely, Severity.ERROR if fails else Severity.WARNING, evidence)


def padding_counts(grid: Grid, seen: Seen, inputs: Any) -> Iterator[Told]:
    """Targets count at positions whose input is padding: declared by an embedding, or by an attention mask."""
    counts = grid.targets != _IGNORED
    total = int(counts.sum())
    for where, by in _paddings(grid.ids, seen, inputs):
        hits = int((where & counts).sum())
        if total and hits > PADDING_SHARE * total:
            text = f"{hits} of {total} targets that count stand where the input is padding, by {by}."
            evidence = {"targets": hits, "of": total}
            yield Told("GG608", text, ("not_masked", "collate"), Severity.WARNING, evidence)
            return
    yield from _looks_padded(grid)


def _looks_padded(grid: Grid) -> Iterator[Told]:
    """Rows that end in one id, over stretches of several lengths, in targets and inputs alike; nothing declares it."""
    last = grid.targets[:, -1]
    runs = _run((grid.targets == last[:, None]) & (grid.ids == last[:, None]))
    lengths = runs.sum(1)
    ends = last[lengths > 0]
    if not ends.numel() or int(ends[0]) == _IGNORED or len(ends.unique()) > 1 or len(lengths.unique()) < _LENGTHS:
        return
    hits, total = int(lengths.sum()), int((grid.targets != _IGNORED).sum())
    if 2 * ends.numel() < len(last):
        return
    text = (
        f"{hits} of {total} targets that count are {int(ends[0])}, in runs at the end of {ends.numel()} of "
        f"{len(last)} rows: is it padding?"
    )
    yield Told("GG608", text, ("not_masked", "collate"), Severity.INFO, {"targets": hits, "of": total})


def _paddings(ids: Tensor, seen: Seen, inputs: Any) -> Iterator[tuple[Tensor, str]]:
    declared = {each.padding for each in seen.ids if each.padding is not None}
    for padding in declared:
        is_padding = ids == padding
        right = _run(is_padding)
        left = _run(is_padding.flip(1)).flip(1)
        # Where padding is the end of sequence too, its first one is no padding.
        yield (right & right.roll(1, 1)) | left, f"padding_idx={padding}"
    for mask in _masks(ids, inputs):
        yield mask == 0, "the attention mask"


def _masks(ids: Tensor, inputs: Any) -> Iterable[Tensor]:
    if inputs is None:
        return
    for position, tensor in walk(inputs):
        if "attention_mask" in position and tensor.shape == ids.shape:
            mask = tensor.cpu()
            if bool(((mask == 0) | (mask == 1)).all()):
                yield mask


def _run(same: Tensor) -> Tensor:
    """Where a run of at least MIN_PADDING reaches the right border."""
    run = same.flip(1).long().cumprod(1).flip(1).to(torch.bool)
    return run & (run.sum(1, keepdim=True) >= MIN_PADDING)
