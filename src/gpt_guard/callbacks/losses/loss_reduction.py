"""How the losses of all positions became the number that `backward()` is called on, and whether it is an odd one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from gpt_guard.callbacks.losses.first_loss import ALLOWED_ABOVE, FirstLoss, loss_parts
from gpt_guard.callbacks.losses.loss_calls import ClassIds, Told, reduction_of
from gpt_guard.hooks.functions.functions import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

_SAME = 1e-5
_ADDED = 0.5
"""Nats that smoothing or class weights add before they are what makes a loss odd, as much as is allowed below."""
_MOST_SCORES = 2**22
"""16 MB of float32 are looked at."""


class Reduced(NamedTuple):
    """What a class loss came to: the sum over its positions, how many there are, and how many of them count."""

    name: str
    reduction: str
    total: float
    positions: int
    counted: int


def reduced(call: FunctionCall, known: ClassIds) -> Reduced | None:
    """Numbers of a call that gives no mean; None for one that does. Reads the result."""
    reduction, result = reduction_of(call), call.result
    if reduction == "mean" or not isinstance(result, Tensor):
        return None
    return Reduced(call.name, reduction, float(result.detach().sum()), known.targets.numel(), int(known.counted.sum()))


def judge_reduction(each: Reduced, loss: float) -> Iterator[Told]:
    """GG655 where the loss as a whole is the plain sum, or a mean over ignored positions as well."""
    if each.counted < 2 or not math.isfinite(loss) or each.total == 0:
        return
    evidence = {"loss": loss, "positions": each.positions, "counted": each.counted}
    if math.isclose(loss, each.total, rel_tol=_SAME):
        text = (
            f"The loss {number(loss)} is the sum over {each.counted} targets, {each.counted} times their mean "
            f"{number(each.total / each.counted)}: loss and gradients grow with the batch."
        )
        # A sum is a choice that a learning rate can make up for.
        yield Told("GG655", text, ("sum",), Severity.INFO, evidence)
    elif each.counted < each.positions and math.isclose(loss, each.total / each.positions, rel_tol=_SAME):
        text = (
            f"The loss {number(loss)} is the sum over {each.counted} targets divided by {each.positions} positions, "
            f"ignored ones included; the mean over those that count is {number(each.total / each.counted)}."
        )
        yield Told("GG655", text, ("all_positions",), Severity.WARNING, evidence)


def first_loss(call: FunctionCall, known: ClassIds) -> Iterator[Told]:
    """GG627 where the first loss of a run is far above log C, with what explains it. Reads scores and result."""
    found = _parts(known)
    if found is None or call.kind != "cross_entropy":
        return
    weights, smoothing = call.get("weight") is not None, float(call.get("label_smoothing", 0.0))
    loss = float(call.result.detach()) if reduction_of(call) == "mean" else found.loss
    added = loss - found.loss if weights or smoothing else 0.0
    dear = loss > found.log_vocab + ALLOWED_ABOVE and added > _ADDED
    # Confident logits that are right are a model that comes from training.
    high = found.loss > found.highest
    if not (high or dear) or not math.isfinite(loss):
        return
    classes = round(math.exp(found.log_vocab))
    text = f"The first loss is {number(loss)}; an even guess among {classes} classes costs {number(found.log_vocab)}."
    given = [f"label_smoothing={smoothing:g}"] * (smoothing > 0) + ["class weights"] * weights
    likely: list[str] = ["smoothing"] * (smoothing > 0) + ["weights"] * weights
    if given:
        without = "which explains it" if not high else "which does not explain it alone"
        text += f" With {' and '.join(given)}, {without}: without, it is {number(found.loss)}."
    large = found.even > found.log_vocab + ALLOWED_ABOVE
    text += f" The logits have a standard deviation of {number(found.spread)}."
    likely = likely if not high else ["scale" if large else "other_task", *likely]
    evidence: dict[str, Any] = {"loss": loss, "expected": found.log_vocab, "plain": found.loss, "spread": found.spread}
    yield Told("GG627", text, tuple(likely), Severity.INFO, evidence)


def _parts(known: ClassIds) -> FirstLoss | None:
    rows = known.scores.detach().movedim(known.dim, -1).reshape(-1, known.classes)
    counts = known.counted.reshape(-1)
    if rows.size(0) != counts.numel() or known.classes < 2:
        return None
    most = max(1, _MOST_SCORES // known.classes)
    chosen = counts.nonzero()[:most, 0]
    targets = known.targets.reshape(-1)[chosen].long()
    return (
        loss_parts(rows[chosen].float(), targets) if bool(((targets >= 0) & (targets < known.classes)).all()) else None
    )
