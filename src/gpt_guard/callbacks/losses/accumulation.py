"""What each micro-batch of a step counts for: the share of its mean cross entropy in what backward() was called on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.losses.calls import ClassIds, reduction_of
from gpt_guard.hooks.functions.call_record import CallPlace
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

UNEQUAL = 1.5
"""From this ratio on, micro-batches of different numbers of targets are told; below it the difference is small beside
what the batches differ in anyway."""
_SAME = 1e-3


class MeanLoss(NamedTuple):
    """A class loss that one backward may be of: its mean over the targets that count, and how many do."""

    place: CallPlace
    mean: float
    counted: int


class MicroBatch(NamedTuple):
    """One backward of a step, whose loss is `factor` times the mean over `counted` targets."""

    place: CallPlace
    counted: int
    factor: float


def mean_loss(call: FunctionCall, known: ClassIds, place: CallPlace) -> MeanLoss | None:
    """The mean of a call, however it was reduced; None with class weights, or where no target counts. Reads it."""
    counted = int(known.counted.sum())
    if call.get("weight") is not None or not counted or not call.result.requires_grad:
        return None
    value = float(call.result.detach().sum())
    mean = value if reduction_of(call) == "mean" else value / counted
    return MeanLoss(place, mean, counted) if math.isfinite(mean) and mean > 0 else None


def micro_batch(losses: Sequence[MeanLoss], loss: float) -> MicroBatch | None:
    """The backward of this loss, if only one class loss was computed for it."""
    if len(losses) != 1 or not math.isfinite(loss) or loss <= 0:
        return None
    (only,) = losses
    return MicroBatch(only.place, only.counted, loss / only.mean)


class AccumulatedSteps:
    """The steps of several micro-batches in an inspected stretch, and what each of them has shown."""

    def __init__(self) -> None:
        self._steps = 0
        self._found: list[tuple[int, CallPlace, CallIssue]] = []

    def add(self, step: int, batches: Sequence[MicroBatch | None]) -> None:
        """Take in the backwards of one step."""
        self._steps += len(batches) > 1
        self._found += [(step, place, issue) for place, issue in _judge(batches)]

    def judge(self) -> Iterator[tuple[int, CallPlace, CallIssue]]:
        """GG240 where it was so in all of them: a last, shorter window may have such a factor by chance.

        GG239 where it was so in one: of steps in a row LoopOrder tells.
        """
        for code in ("GG240", "GG239"):
            found = [each for each in self._found if each[2].code == code]
            if found and len(found) == (self._steps if code == "GG240" else 1):
                yield found[0]


def _judge(batches: Sequence[MicroBatch | None]) -> Iterator[tuple[CallPlace, CallIssue]]:
    """GG240 and GG239 for the backwards of one step, if each is a multiple of one class loss at the same place."""
    known = [each for each in batches if each is not None]
    count = len(known)
    if count < 2 or count < len(batches) or len({each.place.key for each in known}) > 1:
        return
    factor = known[0].factor
    if not all(math.isclose(each.factor, factor, rel_tol=_SAME) for each in known):
        # Each has a weight of its own, as where a sum is divided by the targets of all.
        return
    place = known[0].place
    if math.isclose(factor * count**2, 1.0, rel_tol=_SAME):
        yield place, _twice(factor, count)
    counted = [each.counted for each in known]
    if max(counted) >= UNEQUAL * min(counted):
        yield place, _unequal(counted)


def _twice(factor: float, count: int) -> CallIssue:
    text = (
        f"backward() was called on {number(factor)} times the mean cross entropy of its own call, in each of "
        f"{count} micro-batches: they add up to 1/{count} of their mean. {count} * {count} is {count**2}, and 1 / "
        f"{count**2} is {number(1 / count**2)}: the loss is divided by {count} twice."
    )
    return CallIssue("GG240", text, ("twice",), None, {"factor": factor, "micro_batches": count})


def _unequal(counted: Sequence[int]) -> CallIssue:
    total, count = sum(counted), len(counted)
    fewest, most = counted.index(min(counted)), counted.index(max(counted))
    ratio = counted[most] / counted[fewest]
    shown = ", ".join(f"{each}" for each in counted[:8]) + (", ..." if count > 8 else "")
    weights = ", ".join(number(each / total) for each in counted[:8]) + (", ..." if count > 8 else "")
    text = (
        f"{count} micro-batches of {shown} targets that count went into one step with equal weight: a target in "
        f"micro-batch {fewest} weighs {ratio:.3g} times one in micro-batch {most}. With the weights {weights} all "
        f"targets would count alike."
    )
    return CallIssue("GG239", text, ("mean_of_means",), Severity.INFO, {"counted": list(counted[:50]), "ratio": ratio})
