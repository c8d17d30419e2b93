"""What kind of scores a loss is given: raw scores, probabilities or log-probabilities, and over which dimension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gpt_guard.callbacks.losses.layout import layout_of, moved_along
from gpt_guard.callbacks.losses.loss_calls import Seen, Squash, Told, class_dim, class_ids
from gpt_guard.callbacks.losses.scores import are_log_probabilities, are_probabilities, score_rows
from gpt_guard.hooks.autograd_graph.origin import is_logistic, name_of, origin, signed
from gpt_guard.hooks.functions.functions import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

_POSITIVE = 1e-2
"""A log-probability is at most 0; rounding and log(p + eps) stay below this."""


def judge_scores(call: FunctionCall, seen: Seen) -> Iterator[Told]:
    """Whether the scores are what this loss takes. Reads them.

    Before the call, so that an error of torch's own comes later.
    """
    scores = call.get("input")
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.numel() == 0 or scores.dim() == 0:
        return
    if call.kind == "cross_entropy":
        yield from _cross_entropy(call, scores, seen)
    elif call.kind == "nll_loss":
        yield from _nll(call, scores, seen)
    elif call.kind == "kl_div":
        yield from _divergence(call, scores)
    elif call.kind == "binary_cross_entropy":
        yield from _binary(scores)
    elif call.kind == "binary_cross_entropy_with_logits":
        yield from _binary_with_logits(scores, seen)


def implicit_dim(call: FunctionCall) -> Told | None:
    """A softmax without a dimension: of three dimensions torch takes the first, which is the batch."""
    result = call.result
    if call.get("dim") is not None or not isinstance(result, Tensor) or result.dim() != 3 or result.size(0) < 2:
        return None
    seen = f"{call.name} was given no dimension, and takes dimension 0 of {list(result.shape)}: it runs over the batch."
    return Told("GG692", seen, ("implicit",), evidence={"shape": list(result.shape), "dim": 0})


def squashed_twice(call: FunctionCall, seen: Seen) -> Told | None:
    """GG652 in a loss that is written by hand: log_softmax of what softmax made. Reads the scores.

    `torch.distributions.Categorical(logits=...)` takes logsumexp of what it is given.
    """
    scores, dim = call.get("input"), call.get("dim")
    if call.kind not in ("log_softmax", "logsumexp") or not isinstance(scores, Tensor) or not isinstance(dim, int):
        return None
    made_by = origin(scores) if scores.requires_grad and scores.numel() and scores.size(dim) > 1 else None
    if made_by is None or name_of(made_by) != "Softmax" or not are_probabilities(score_rows(scores, dim)):
        return None
    told = _twice(scores, _squash(made_by, seen), call.kind)
    return told._replace(likely=("by_hand", *told.likely), severity=Severity.WARNING)


def _rows(call: FunctionCall, scores: Tensor, dim: int) -> Tensor:
    known = class_ids(call)
    return score_rows(scores, dim, known.counted if known is not None else None)


def _cross_entropy(call: FunctionCall, scores: Tensor, seen: Seen) -> Iterator[Told]:
    dim = class_dim(scores)
    if scores.size(dim) < 2:
        return
    where = layout_of(scores, dim)
    if where is not None and where.classes != "whole" and where.features == scores.size(dim):
        yield _misplaced(scores, where.classes)
        return
    rows, made_by = _rows(call, scores, dim), origin(scores)
    squash = _squash(made_by, seen)
    if are_probabilities(rows):
        yield _twice(scores, squash, "cross_entropy")
    elif (wrong := _wrong_dimension(call, scores, dim, seen)) is not None:
        yield wrong
    elif is_logistic(made_by):
        text = f"The scores {list(scores.shape)} that cross_entropy is given are the output of a sigmoid, from 0 to 1."
        yield Told("GG690", text, ("sigmoid",), Severity.WARNING)
    elif squash is not None and squash.name == "log_softmax" and are_log_probabilities(rows):
        text = f"cross_entropy is given the log-probabilities of {squash.words}, and takes log_softmax of them again."
        yield Told("GG690", f"{text} Of log-probabilities that changes nothing.", ("harmless",), Severity.INFO)


def _nll(call: FunctionCall, scores: Tensor, seen: Seen) -> Iterator[Told]:
    dim = class_dim(scores)
    if scores.size(dim) < 2:
        return
    rows = _rows(call, scores, dim)
    if are_probabilities(rows):
        yield _twice(scores, _squash(origin(scores), seen), "nll_loss")
    elif (wrong := _wrong_dimension(call, scores, dim, seen)) is not None:
        yield wrong
    elif float(rows.max()) > _POSITIVE and not are_log_probabilities(rows):
        sums = float(rows.float().logsumexp(-1).exp().mean())
        text = (
            f"nll_loss takes log-probabilities; the scores {list(scores.shape)} reach {number(float(rows.max()))}, and "
            f"their exponentials sum to {number(sums)} in a row, not to 1."
        )
        yield Told("GG690", text, ("raw_nll",), evidence={"max": float(rows.max()), "sum": sums})


def _divergence(call: FunctionCall, scores: Tensor) -> Iterator[Told]:
    goal, logs = call.get("target"), bool(call.get("log_target", False))
    dims = [dim for dim in {scores.dim() - 1, class_dim(scores)} if scores.size(dim) > 1]
    if not dims or not isinstance(goal, Tensor) or goal.shape != scores.shape:
        return
    rows, goals = [score_rows(scores, dim) for dim in dims], [score_rows(goal, dim) for dim in dims]
    if any(are_probabilities(each) for each in rows):
        swapped = not logs and any(are_log_probabilities(each) for each in goals)
        text = "kl_div takes log-probabilities first; its first argument has rows that lie in 0 ... 1 and sum to 1."
        if swapped:
            text += " Its second one holds log-probabilities: the two are swapped."
        yield Told("GG690", text, ("kl_swapped",) if swapped else ("kl_probabilities",))
    elif float(rows[0].max()) > _POSITIVE and not any(are_log_probabilities(each) for each in rows):
        text = f"kl_div takes log-probabilities first; its first argument reaches {number(float(rows[0].max()))}."
        yield Told("GG690", text, ("kl_raw",), Severity.WARNING)
    elif not logs and float(goals[0].min()) < -_POSITIVE:
        text = f"kl_div takes probabilities second; its second argument goes down to {number(float(goals[0].min()))}."
        yield Told("GG690", text, ("kl_target",))
    elif logs and any(are_probabilities(each) for each in goals):
        text = "kl_div is told log_target=True; its second argument has rows that lie in 0 ... 1 and sum to 1."
        yield Told("GG690", text, ("kl_target",))


def _binary(scores: Tensor) -> Iterator[Told]:
    low, high = (float(each) for each in scores.detach().aminmax())
    if low < 0 or high > 1:
        text = f"binary_cross_entropy takes probabilities; it is given {number(low)} to {number(high)}."
        yield Told("GG690", text, ("raw_bce",), evidence={"min": low, "max": high})


def _binary_with_logits(scores: Tensor, seen: Seen) -> Iterator[Told]:
    made_by = origin(scores)
    low, high = (float(each) for each in scores.detach().aminmax())
    if made_by is None or low < 0 or high > 1:
        return
    squash = _squash(made_by, seen)
    soft = squash is not None or name_of(made_by) == "Softmax"
    if soft or is_logistic(made_by):
        name = "softmax" if soft else "sigmoid"
        text = (
            f"binary_cross_entropy_with_logits applies sigmoid itself; it is given the output of "
            f"{squash.words if squash else name}, from {number(low)} to {number(high)}."
        )
        yield Told("GG691", text, (name,), evidence={"min": low, "max": high})


def _twice(scores: Tensor, squash: Squash | None, loss: str) -> Told:
    by = f" They come from {squash.words}." if squash is not None else ""
    takes = "log-probabilities" if loss == "nll_loss" else "raw scores"
    text = f"{loss} takes {takes}; each row of the scores {list(scores.shape)} lies between 0 and 1 and sums to 1.{by}"
    inside = squash is None or squash.module is not None
    likely = "log" if loss == "nll_loss" else "in_model" if inside else "in_loss"
    module = squash.module if squash is not None else None
    return Told("GG652", text, (likely,), evidence={"shape": list(scores.shape)}, module=module)


def _squash(node: Any, seen: Seen) -> Squash | None:
    return None if node is None else seen.squashes.get(int(node._sequence_nr()))


def _misplaced(scores: Tensor, classes: str) -> Told:
    shape = list(scores.shape)
    if classes == "positions" and len(shape) > 2:
        text = f"cross_entropy takes dimension 1 of {shape} for the classes; the output layer has them last."
        return Told("GG692", text, ("class_dim",), evidence={"shape": shape, "dim": 1})
    text = f"The classes of one row of the scores {shape} come from several positions: viewed, not transposed."
    return Told("GG654", text, ("viewed",), evidence={"shape": shape})


def _wrong_dimension(call: FunctionCall, scores: Tensor, dim: int, seen: Seen) -> Told | None:
    found = moved_along(scores, dim, ("Softmax", "LogSoftmax"))
    if found is None or not found[1]:
        return None
    node, classes = found
    shape = list(node._input_metadata[0].shape)
    over = signed(node._saved_dim) % len(shape)
    if over in classes:
        return None
    squash = _squash(node, seen)
    text = (
        f"The scores of {call.name} come from {squash.words if squash else name_of(node)} over dimension {over} of "
        f"{shape}; the classes lie along dimension {min(classes)}."
    )
    return Told("GG692", text, ("dim",), evidence={"shape": shape, "dim": over, "classes": min(classes)})
