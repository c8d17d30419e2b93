"""What targets a loss is given: in range, of the shape of the predictions, and which of them count.

Whole numbers or probabilities where classes are chosen; none that counts, hardly any, or padding as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.losses.calls import (
    BINARY_LOSSES,
    CLASS_LOSSES,
    DISTANCES,
    ClassIds,
    class_dim,
    class_ids,
    reduction_of,
)
from gpt_guard.callbacks.losses.pairing import Grid
from gpt_guard.callbacks.losses.scores import score_rows
from gpt_guard.hooks.autograd_graph.nodes import name_of, nodes
from gpt_guard.hooks.functions.call_record import CallRecord
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Severity
from gpt_guard.records.render import number

_OFF = 1e-2
"""Soft targets are rounded, and may come from half precision."""
_NOISE = 0.3
"""Binary labels with noise on purpose: 0 ... 0.3 and 0.7 ... 1.2 are usual for GANs (Salimans et al. 2016)."""
_NEAR_LOSS = 40
"""Operations at the end of the graph in which a loss written by hand is looked for."""
_IGNORED = -100
HARDLY_ANY = 0.01
"""Where rows are unknown, less is reported. Answers after long prompts are a few percent of all positions."""
_LENGTHS = 3
_SHOWN = 16
MIN_PADDING = 4
"""Equal ids at the end of a row that count as padding, as in preflight."""
PADDING_SHARE = 0.01
"""Of the targets that count; less is the end of sequence, or a row or two."""


def judge_targets(call: FunctionCall) -> Iterator[CallIssue]:
    """Whether the targets are what this loss takes. Reads them; before the call, which may raise or be an assert."""
    scores, targets = call.get("input"), call.get("target")
    if not isinstance(scores, Tensor) or not isinstance(targets, Tensor) or targets.numel() == 0:
        return
    if call.kind in DISTANCES:
        yield from _broadcast(call, scores, targets)
    elif call.kind in BINARY_LOSSES:
        yield from _between_0_and_1(call, targets)
    elif call.kind in CLASS_LOSSES and scores.dim() > 0:
        if scores.size(class_dim(scores)) == 1:
            text = f"{call.name} chooses among one class, of scores {list(scores.shape)}: it is 0 whatever they are."
            yield CallIssue("GG693", text, ("one_class",))
        elif targets.is_floating_point():
            yield from _soft(call, scores, targets)
        else:
            yield from _out_of_range(call)


def _out_of_range(call: FunctionCall) -> Iterator[CallIssue]:
    known = class_ids(call)
    if known is None:
        return
    targets = known.targets.long()
    bad = targets[known.counted & ((targets < 0) | (targets >= known.classes))]
    if not bad.numel():
        return
    values, counts = bad.unique(return_counts=True)
    listed = ", ".join(f"{int(v)} ({int(n)} times)" for v, n in zip(values[:4], counts[:4], strict=True))
    text = (
        f"{bad.numel()} of {targets.numel()} targets are outside of 0 ... {known.classes - 1}: {listed}; ignore_index "
        f"is {known.ignore_index}."
    )
    below = len(values) == 1 and int(values[0]) < 0
    evidence = {"targets": bad.numel(), "of": targets.numel(), "classes": known.classes, "values": values[:8].tolist()}
    yield CallIssue("GG604", text, ("ignore_index",) if below else ("too_large",), evidence=evidence)


def _soft(call: FunctionCall, scores: Tensor, targets: Tensor) -> Iterator[CallIssue]:
    if targets.shape != scores.shape:
        text = (
            f"{call.name} is given targets {list(targets.shape)} of {str(targets.dtype).removeprefix('torch.')} for "
            f"scores {list(scores.shape)}: ids must be int64, probabilities have the shape of the scores."
        )
        yield CallIssue("GG693", text, ("float_ids",))
        return
    rows = score_rows(targets, class_dim(scores)).float()
    sums = rows.sum(-1)
    if float(rows.min()) < -_OFF:
        text = f"{call.name} takes probabilities as soft targets; they go down to {number(float(rows.min()))}."
        yield CallIssue("GG693", text, ("soft_raw",))
    elif bool((((sums - 1).abs() > _OFF) & (sums.abs() > _OFF)).any()):
        low, high = number(float(sums.min())), number(float(sums.max()))
        text = f"Soft targets of {call.name} sum to {low} ... {high} in a row."
        # Weights of samples may be multiplied into them on purpose.
        yield CallIssue("GG693", text, ("multi_label",), Severity.INFO)


def _between_0_and_1(call: FunctionCall, targets: Tensor) -> Iterator[CallIssue]:
    low, high = (float(each) for each in targets.detach().aminmax())
    if low >= -_NOISE and high <= 1 + _NOISE:
        return
    signs = sorted(targets.detach().unique()[:3].tolist()) == [-1.0, 1.0]
    text = f"{call.name} takes targets from 0 to 1; they go from {number(low)} to {number(high)}."
    yield CallIssue("GG693", text, ("signs",) if signs else ("binary_range",), evidence={"min": low, "max": high})


def _broadcast(call: FunctionCall, scores: Tensor, targets: Tensor) -> Iterator[CallIssue]:
    try:
        shape = torch.broadcast_shapes(scores.shape, targets.shape)
    except RuntimeError:
        return  # torch says so itself
    # Of equal numbers of dimensions, both have one more on purpose.
    if scores.dim() != targets.dim() and shape.numel() > max(scores.numel(), targets.numel()):
        yield _outer(call.name, list(scores.shape), list(targets.shape), list(shape))


def _outer(
    name: str, one: list[int], other: list[int] | None, both: list[int], severity: Severity | None = None
) -> CallIssue:
    against = f" and targets {other}" if other is not None else " and the targets"
    text = f"{name}: predictions {one}{against} become {both}, every prediction against every target."
    return CallIssue("GG694", text, ("keepdim",), severity, {"predictions": one, "targets": other, "both": both})


def outer_difference(loss: Tensor) -> CallIssue | None:
    """The same in a loss written by hand: predictions `[B, 1]` minus targets `[B]` near the end of the graph."""
    for count, node in enumerate(nodes(loss)):
        if count == _NEAR_LOSS:
            return None
        if name_of(node) == "Sub" and (found := _crossed(node)) is not None:
            return found
    return None


def _crossed(node: Any) -> CallIssue | None:
    shape = list(node._input_metadata[0].shape)
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    if len(parents) != 1 or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
        return None
    known = getattr(parents[0], "_input_metadata", ())
    one = list(known[0].shape) if known else []
    # Whoever adds a dimension means every pair.
    column = one == [shape[0], 1] and name_of(parents[0]) in ("Addmm", "Mm", "Linear", "Sigmoid", "Tanh", "Add", "Mul")
    flat = one == [shape[0]] and name_of(parents[0]) in ("Squeeze", "Select", "View", "ReshapeAlias", "Mean")
    if not column and not flat:
        return None
    return _outer("a difference in the loss", one, None, shape, Severity.WARNING)


@dataclass
class TargetCount:
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


def none_counts(call: FunctionCall, record: CallRecord) -> Iterator[CallIssue]:
    """The mean of no targets is 0/0. A sum over none is 0, as an empty micro-batch may be."""
    known = class_ids(call)
    if known is None or reduction_of(call) != "mean" or bool(known.counted.any()):
        return
    total, shape = known.targets.numel(), record.flattened_from(known.targets)
    rows = f" in all {shape[0]} rows" if shape is not None else ""
    text = f"0 of {total} targets count, all are {known.ignore_index}{rows}: the mean over them is 0/0, which is NaN."
    if record.embedded:
        # Where the marker of an answer was looked for, and not found.
        first = ", ".join(str(each) for each in record.embedded[0].ids[0, :_SHOWN].tolist())
        text += f" Row 0 of the inputs begins with {first}."
    yield CallIssue(
        "GG606", text, ("marker",), evidence={"targets": 0, "of": total, "ignore_index": known.ignore_index}
    )


def hardly_any(count: TargetCount) -> Iterator[CallIssue]:
    """GG606 over all inspected steps, by the bounds of preflight where rows are known."""
    if count.total == 0 or count.counted == count.total:
        return
    few_rows = count.of_rows > 0 and (count.counted < count.of_rows or 2 * count.rows < count.of_rows)
    few = count.of_rows == 0 and count.counted < HARDLY_ANY * count.total
    if count.counted and not few and not few_rows:
        return
    text = f"{count.counted} of {count.total} targets count, the rest is {count.ignore_index}"
    if count.of_rows:
        text += f"; {count.of_rows - count.rows} of {count.of_rows} rows have none"
    fails = count.counted == 0 or (count.of_rows > 0 and count.counted < count.of_rows)
    likely = ("marker", "truncated") if fails else ("truncated", "marker")
    evidence = {"targets": count.counted, "of": count.total, "rows": count.rows, "of_rows": count.of_rows}
    yield CallIssue("GG606", text + ".", likely, Severity.ERROR if fails else Severity.WARNING, evidence)


def padding_counts(grid: Grid, record: CallRecord, inputs: Any) -> Iterator[CallIssue]:
    """Targets count at positions whose input is padding: declared by an embedding, or by an attention mask."""
    counts = grid.targets != _IGNORED
    total = int(counts.sum())
    for where, by in _paddings(grid.ids, record, inputs):
        hits = int((where & counts).sum())
        if total and hits > PADDING_SHARE * total:
            text = f"{hits} of {total} targets that count stand where the input is padding, by {by}."
            evidence = {"targets": hits, "of": total}
            yield CallIssue("GG608", text, ("not_masked", "collate"), Severity.WARNING, evidence)
            return
    yield from _looks_padded(grid)


def _looks_padded(grid: Grid) -> Iterator[CallIssue]:
    """Rows that end in one id, over stretches of several lengths, in targets and inputs alike; nothing declares it."""
    last = grid.targets[:, -1]
    runs = trailing_run((grid.targets == last[:, None]) & (grid.ids == last[:, None]))
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
    yield CallIssue("GG608", text, ("not_masked", "collate"), Severity.INFO, {"targets": hits, "of": total})


def _paddings(ids: Tensor, record: CallRecord, inputs: Any) -> Iterator[tuple[Tensor, str]]:
    declared = {each.padding for each in record.embedded if each.padding is not None}
    for padding in declared:
        is_padding = ids == padding
        right = trailing_run(is_padding)
        left = trailing_run(is_padding.flip(1)).flip(1)
        # Where padding is the end of sequence too, its first one is no padding.
        yield (right & right.roll(1, 1)) | left, f"padding_idx={padding}"
    for position, tensor in walk(inputs):
        if "attention_mask" in position and tensor.shape == ids.shape:
            mask = tensor.cpu()
            if bool(((mask == 0) | (mask == 1)).all()):
                yield mask == 0, "the attention mask"


def trailing_run(same: Tensor) -> Tensor:
    """Where a run of at least MIN_PADDING reaches the right border."""
    run = same.flip(1).long().cumprod(1).flip(1).to(torch.bool)
    return run & (run.sum(1, keepdim=True) >= MIN_PADDING)
