"""What kind of scores a loss is given: raw scores, probabilities or log-probabilities, and over which dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.losses.calls import CLASS_LOSSES, class_dim, class_ids
from gpt_guard.callbacks.losses.positions import moved_along, positions_of
from gpt_guard.hooks.autograd_graph.nodes import is_logistic, name_of, origin, signed
from gpt_guard.hooks.functions.call_record import SOFTMAXES, CallRecord, SoftmaxCall
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

MOST_ROWS = 1024
"""More rows than this say nothing more about what kind of scores they are."""
_FEWEST_ROWS = 16
_MOST_SCORES = 2**22
"""Fewer rows of a large vocabulary: 16 MB of float32 are looked at."""
_POSITIVE = 1e-2
"""A log-probability is at most 0; rounding and log(p + eps) stay below this."""


def judge_scores(call: FunctionCall, record: CallRecord) -> Iterator[CallIssue]:
    """Whether the scores are what this loss takes. Reads them.

    Before the call, so that an error of torch's own comes later.
    """
    scores = call.get("input")
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.numel() == 0 or scores.dim() == 0:
        return
    if call.kind in CLASS_LOSSES:
        yield from _of_classes(call, scores, record)
    elif call.kind == "kl_div":
        yield from _divergence(call, scores)
    elif call.kind == "binary_cross_entropy":
        yield from _binary(scores)
    elif call.kind == "binary_cross_entropy_with_logits":
        yield from _binary_with_logits(scores, record)


def judge_softmax(call: FunctionCall, record: CallRecord) -> CallIssue | None:
    """Whether a softmax runs over the batch, or is taken of what a softmax made. Reads its input."""
    return _implicit_dim(call) or _squashed_twice(call, record)


def _implicit_dim(call: FunctionCall) -> CallIssue | None:
    """A softmax without a dimension: of three dimensions torch takes the first, which is the batch."""
    result = call.result
    if call.kind not in SOFTMAXES or call.get("dim") is not None:
        return None
    if not isinstance(result, Tensor) or result.dim() != 3 or result.size(0) < 2:
        return None
    text = f"{call.name} was given no dimension, and takes dimension 0 of {list(result.shape)}: it runs over the batch."
    return CallIssue("GG692", text, ("implicit",), evidence={"shape": list(result.shape), "dim": 0})


def _squashed_twice(call: FunctionCall, record: CallRecord) -> CallIssue | None:
    """GG652 in a loss that is written by hand: log_softmax of what softmax made.

    `torch.distributions.Categorical(logits=...)` takes logsumexp of what it is given.
    """
    scores, dim = call.get("input"), call.get("dim")
    if call.kind not in ("log_softmax", "logsumexp") or not isinstance(scores, Tensor) or not isinstance(dim, int):
        return None
    made_by = origin(scores) if scores.requires_grad and scores.numel() and scores.size(dim) > 1 else None
    if made_by is None or name_of(made_by) != "Softmax" or not are_probabilities(score_rows(scores, dim)):
        return None
    issue = _twice(scores, record.softmax_of(made_by), call.kind)
    return issue._replace(likely=("by_hand", *issue.likely), severity=Severity.WARNING)


def _of_classes(call: FunctionCall, scores: Tensor, record: CallRecord) -> Iterator[CallIssue]:
    dim = class_dim(scores)
    if scores.size(dim) < 2:
        return
    raw = call.kind == "cross_entropy"
    where = positions_of(scores, dim) if raw else None
    if where is not None and where.classes != "whole" and where.features == scores.size(dim):
        yield _misplaced(scores, where.classes)
        return
    known = class_ids(call)
    rows = score_rows(scores, dim, known.counted if known is not None else None)
    if are_probabilities(rows):
        yield _twice(scores, record.softmax_of(origin(scores)), call.kind)
    elif (wrong := _wrong_dimension(call, scores, dim, record)) is not None:
        yield wrong
    else:
        yield from _no_logits(scores, rows, record) if raw else _no_log_probabilities(scores, rows)


def _no_logits(scores: Tensor, rows: Tensor, record: CallRecord) -> Iterator[CallIssue]:
    made_by = origin(scores)
    softmax = record.softmax_of(made_by)
    if is_logistic(made_by):
        text = f"The scores {list(scores.shape)} that cross_entropy is given are the output of a sigmoid, from 0 to 1."
        yield CallIssue("GG690", text, ("sigmoid",), Severity.WARNING)
    elif softmax is not None and softmax.name == "log_softmax" and are_log_probabilities(rows):
        text = f"cross_entropy is given the log-probabilities of {softmax}, and takes log_softmax of them again."
        yield CallIssue("GG690", f"{text} Of log-probabilities that changes nothing.", ("harmless",), Severity.INFO)


def _no_log_probabilities(scores: Tensor, rows: Tensor) -> Iterator[CallIssue]:
    highest = float(rows.max())
    if highest > _POSITIVE and not are_log_probabilities(rows):
        sums = float(rows.float().logsumexp(-1).exp().mean())
        text = (
            f"nll_loss takes log-probabilities; the scores {list(scores.shape)} reach {number(highest)}, and their "
            f"exponentials sum to {number(sums)} in a row, not to 1."
        )
        yield CallIssue("GG690", text, ("raw_nll",), evidence={"max": highest, "sum": sums})


def _divergence(call: FunctionCall, scores: Tensor) -> Iterator[CallIssue]:
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
        yield CallIssue("GG690", text, ("kl_swapped",) if swapped else ("kl_probabilities",))
    elif float(rows[0].max()) > _POSITIVE and not any(are_log_probabilities(each) for each in rows):
        text = f"kl_div takes log-probabilities first; its first argument reaches {number(float(rows[0].max()))}."
        yield CallIssue("GG690", text, ("kl_raw",), Severity.WARNING)
    elif not logs and float(goals[0].min()) < -_POSITIVE:
        text = f"kl_div takes probabilities second; its second argument goes down to {number(float(goals[0].min()))}."
        yield CallIssue("GG690", text, ("kl_target",))
    elif logs and any(are_probabilities(each) for each in goals):
        text = "kl_div is told log_target=True; its second argument has rows that lie in 0 ... 1 and sum to 1."
        yield CallIssue("GG690", text, ("kl_target",))


def _binary(scores: Tensor) -> Iterator[CallIssue]:
    low, high = (float(each) for each in scores.detach().aminmax())
    if low < 0 or high > 1:
        text = f"binary_cross_entropy takes probabilities; it is given {number(low)} to {number(high)}."
        yield CallIssue("GG690", text, ("raw_bce",), evidence={"min": low, "max": high})


def _binary_with_logits(scores: Tensor, record: CallRecord) -> Iterator[CallIssue]:
    made_by = origin(scores)
    low, high = (float(each) for each in scores.detach().aminmax())
    if made_by is None or low < 0 or high > 1:
        return
    squash = record.softmax_of(made_by)
    soft = squash is not None or name_of(made_by) == "Softmax"
    if soft or is_logistic(made_by):
        name = "softmax" if soft else "sigmoid"
        text = (
            f"binary_cross_entropy_with_logits applies sigmoid itself; it is given the output of "
            f"{squash or name}, from {number(low)} to {number(high)}."
        )
        yield CallIssue("GG691", text, (name,), evidence={"min": low, "max": high})


def _twice(scores: Tensor, squash: SoftmaxCall | None, loss: str) -> CallIssue:
    by = f" They come from {squash}." if squash is not None else ""
    takes = "log-probabilities" if loss == "nll_loss" else "raw scores"
    text = f"{loss} takes {takes}; each row of the scores {list(scores.shape)} lies between 0 and 1 and sums to 1.{by}"
    made_at = squash.place._replace(line=None) if squash is not None else None
    inside = made_at is None or made_at.module is not None
    likely = "log" if loss == "nll_loss" else "in_model" if inside else "in_loss"
    return CallIssue("GG652", text, (likely,), evidence={"shape": list(scores.shape)}, made_at=made_at)


def _misplaced(scores: Tensor, classes: str) -> CallIssue:
    shape = list(scores.shape)
    if classes == "positions" and len(shape) > 2:
        text = f"cross_entropy takes dimension 1 of {shape} for the classes; the output layer has them last."
        return CallIssue("GG692", text, ("class_dim",), evidence={"shape": shape, "dim": 1})
    text = f"The classes of one row of the scores {shape} come from several positions: viewed, not transposed."
    return CallIssue("GG654", text, ("viewed",), evidence={"shape": shape})


def _wrong_dimension(call: FunctionCall, scores: Tensor, dim: int, record: CallRecord) -> CallIssue | None:
    found = moved_along(scores, dim, ("Softmax", "LogSoftmax"))
    if found is None or not found[1]:
        return None
    node, classes = found
    shape = list(node._input_metadata[0].shape)
    over = signed(node._saved_dim) % len(shape)
    if over in classes:
        return None
    squash = record.softmax_of(node)
    text = (
        f"The scores of {call.name} come from {squash or name_of(node)} over dimension {over} of "
        f"{shape}; the classes lie along dimension {min(classes)}."
    )
    return CallIssue("GG692", text, ("dim",), evidence={"shape": shape, "dim": over, "classes": min(classes)})


def are_probabilities(scores: Tensor) -> bool:
    """True where each row lies between 0 and 1 and sums to 1: softmax has been applied. Reads the device."""
    values = scores.detach().float()
    sums = (values.sum(-1) - 1).abs().max()
    return bool((values >= 0).all()) and float(sums) < _tolerance(scores)


def are_log_probabilities(scores: Tensor) -> bool:
    """True where the exponentials of each row sum to 1, or nearly: of log(p + eps) they sum to a little more."""
    sums = scores.detach().float().logsumexp(-1).abs().max()
    # The logarithms that matter are about as large as log C, and are rounded in proportion.
    return float(sums) < max(1e-2, _tolerance(scores) * (1 + math.log(scores.size(-1))))


def _tolerance(scores: Tensor) -> float:
    """What rounding does to a row that sums to 1: each term in its own dtype, the sum in float32."""
    kind, exact, classes = torch.finfo(scores.dtype), torch.finfo(torch.float32), scores.size(-1)
    return float(4 * kind.eps + classes * kind.smallest_normal * kind.eps + 16 * exact.eps * classes**0.5)


def score_rows(scores: Tensor, dim: int, counted: Tensor | None = None) -> Tensor:
    """At most MOST_ROWS rows `[n, C]` of scores with classes along `dim`; of those that `counted` marks, if any are.

    `counted` has the shape of the scores without `dim`. Copies no more than it needs.
    """
    values = scores.detach()
    most = max(_FEWEST_ROWS, min(MOST_ROWS, _MOST_SCORES // max(1, values.size(dim))))
    if values.dim() > 2:
        positions = values.numel() // max(1, values.size(0) * values.size(dim))
        samples = max(1, most // max(1, positions))
        values, counted = values[:samples], None if counted is None else counted[:samples]
    rows = values.movedim(dim, -1).reshape(-1, values.size(dim))
    if counted is not None and counted.numel() == rows.size(0) and bool(counted.any()):
        rows = rows[counted.reshape(-1).nonzero()[:most, 0]]
    return rows[:most]
