"""What kind of targets a loss is given: in range, whole numbers or probabilities, of the shape of the predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.losses.loss_calls import BINARY_LOSSES, CLASS_LOSSES, DISTANCES, Told, class_dim, class_ids
from gpt_guard.callbacks.losses.scores import score_rows
from gpt_guard.hooks.autograd_graph.origin import name_of
from gpt_guard.hooks.autograd_graph.reach import nodes
from gpt_guard.hooks.functions.functions import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

_OFF = 1e-2
"""Soft targets are rounded, and may come from half precision."""
_NOISE = 0.3
"""Binary labels with noise on purpose: 0 ... 0.3 and 0.7 ... 1.2 are usual for GANs (Salimans et al. 2016)."""
_NEAR_LOSS = 40
"""Operations at the end of the graph in which a loss written by hand is looked for."""


def judge_targets(call: FunctionCall) -> Iterator[Told]:
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
            yield Told("GG693", text, ("one_class",))
        elif targets.is_floating_point():
            yield from _soft(call, scores, targets)
        else:
            yield from _out_of_range(call)


def _out_of_range(call: FunctionCall) -> Iterator[Told]:
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
    yield Told("GG604", text, ("ignore_index",) if below else ("too_large",), evidence=evidence)


def _soft(call: FunctionCall, scores: Tensor, targets: Tensor) -> Iterator[Told]:
    if targets.shape != scores.shape:
        text = (
            f"{call.name} is given targets {list(targets.shape)} of {_dtype(targets)} for scores {list(scores.shape)}: "
            f"ids must be int64, probabilities have the shape of the scores."
        )
        yield Told("GG693", text, ("float_ids",))
        return
    rows = score_rows(targets, class_dim(scores)).float()
    sums = rows.sum(-1)
    if float(rows.min()) < -_OFF:
        text = f"{call.name} takes probabilities as soft targets; they go down to {number(float(rows.min()))}."
        yield Told("GG693", text, ("soft_raw",))
    elif bool((((sums - 1).abs() > _OFF) & (sums.abs() > _OFF)).any()):
        low, high = number(float(sums.min())), number(float(sums.max()))
        text = f"Soft targets of {call.name} sum to {low} ... {high} in a row."
        # Weights of samples may be multiplied into them on purpose.
        yield Told("GG693", text, ("multi_label",), Severity.INFO)


def _between_0_and_1(call: FunctionCall, targets: Tensor) -> Iterator[Told]:
    low, high = (float(each) for each in targets.detach().aminmax())
    if low >= -_NOISE and high <= 1 + _NOISE:
        return
    signs = sorted(targets.detach().unique()[:3].tolist()) == [-1.0, 1.0]
    text = f"{call.name} takes targets from 0 to 1; they go from {number(low)} to {number(high)}."
    yield Told("GG693", text, ("signs",) if signs else ("binary_range",), evidence={"min": low, "max": high})


def _broadcast(call: FunctionCall, scores: Tensor, targets: Tensor) -> Iterator[Told]:
    try:
        shape = torch.broadcast_shapes(scores.shape, targets.shape)
    except RuntimeError:
        return  # torch says so itself
    # Of equal numbers of dimensions, both have one more on purpose.
    if scores.dim() != targets.dim() and shape.numel() > max(scores.numel(), targets.numel()):
        yield _outer(call.name, list(scores.shape), list(targets.shape), list(shape))


def _outer(
    name: str, one: list[int], other: list[int] | None, both: list[int], severity: Severity | None = None
) -> Told:
    against = f" and targets {other}" if other is not None else " and the targets"
    text = f"{name}: predictions {one}{against} become {both}, every prediction against every target."
    return Told("GG694", text, ("keepdim",), severity, {"predictions": one, "targets": other, "both": both})


def outer_difference(loss: Tensor) -> Told | None:
    """The same in a loss written by hand: predictions `[B, 1]` minus targets `[B]` near the end of the graph."""
    for count, node in enumerate(nodes(loss)):
        if count == _NEAR_LOSS:
            return None
        if name_of(node) == "Sub" and (found := _crossed(node)) is not None:
            return found
    return None


def _crossed(node: Any) -> Told | None:
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


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
