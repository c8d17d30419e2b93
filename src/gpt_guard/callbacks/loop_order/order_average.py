"""Rules about accumulation: whether the losses of the micro-batches add up to the loss of the whole batch."""

from __future__ import annotations

import math

from gpt_guard.callbacks.loop_order.order_cycle import Cycle, Verdict
from gpt_guard.callbacks.loop_order.order_losses import Term
from gpt_guard.callbacks.loop_order.order_words import about
from gpt_guard.records import Severity
from gpt_guard.records.render import number

# Weights of a loss near 1, as label smoothing leaves them, are no division by a number of micro-batches (2 at least).
_NEAR_ONE = 0.75
_SAME = 1e-3


def _main_terms(cycle: Cycle) -> list[tuple[Term, float]]:
    """The largest addend of each micro-batch's loss, with its factor; empty where that is not the whole truth."""
    if not cycle.accumulates or cycle.touched_by_hand or cycle.seen.skipped:
        return []
    found: list[tuple[Term, float]] = []
    for at in cycle.backwards:
        known = [(term, cycle.scaled(term)) for term in cycle.backward(at).terms]
        sure = [(term, abs(scale)) for term, scale in known if scale is not None]
        if not sure or len(sure) < len(known):
            return []
        found.append(max(sure, key=lambda each: each[1]))
    # Several losses that share a line are several tasks.
    return found if len({term.kind for term, _ in found}) == 1 else []


def _cleared(cycle: Cycle) -> bool:
    """Whether there is no sum: gradients were cleared between the micro-batches."""
    return bool(cycle.backwards and cycle.cleared_between(cycle.backwards[0], cycle.backwards[-1]))


def is_divided(cycle: Cycle) -> bool:
    """Whether each micro-batch's loss is known to be divided by their number: accumulation is meant."""
    main = _main_terms(cycle)
    return bool(main) and all(_divides(cycle, term, len(main)) for term, _ in main)


def not_divided(cycle: Cycle) -> Verdict | None:
    """GG238: each micro-batch's mean counts in full, so the gradient is that many times the mean gradient.

    Only worth knowing: a learning rate may be meant for the sum, truncated backpropagation adds chunks on purpose, and
    Adam divides the factor out again. A warning where clipping makes it matter: the norm is above the limit only
    because of the factor.
    """
    count = len(cycle.backwards)
    main = [] if _cleared(cycle) else _main_terms(cycle)
    if not main or not all(term.mean and _NEAR_ONE <= scale <= 1.0 / _NEAR_ONE for term, scale in main):
        return None
    if any(_divides(cycle, term, count) for term, _ in main):
        return None
    norm = cycle.seen.grad_norm or 0.0
    limits = [clip.limit for at, clip in cycle.clips() if cycle.own(at) and clip.how == "norm" and not clip.scaled]
    cut = next((limit for limit in limits if norm / count <= limit < norm < math.inf), None)
    text = (
        f"The losses of {count} micro-batches are means, and none is divided by {count}: the gradient of this step "
        f"(norm {number(norm)}) is about {count} times that of the mean over all of them."
    )
    if cut is not None:
        text += f" It is cut to {number(cut)}, where the mean gradient ({number(norm / count)}) would not be."
    fields = {"severity": Severity.INFO if cut is None else Severity.WARNING, "likely": ["not_divided"]}
    evidence = {"micro_batches": count, "grad_norm": norm, "limit": cut}
    return Verdict(about("GG238", cycle, text, at=cycle.backwards[0], evidence=evidence, **fields))


def _divides(cycle: Cycle, term: Term, count: int) -> bool:
    """Whether one of the factors is the division by the number of micro-batches."""
    values = ((cycle.number(factor.value), factor.power) for factor in term.factors)
    return any(value and abs(value**power * count - 1.0) < _SAME for value, power in values)


def unequal_means(cycle: Cycle, limit: float) -> Verdict | None:
    """GG239: means over different numbers of elements, added with equal weight."""
    weights: list[float] = []
    counts: list[float] = []
    for term, scale in [] if _cleared(cycle) else _main_terms(cycle):
        count = cycle.number(term.count)
        if not count or count <= 0.0:
            return None
        counts.append(count)
        weights.append(scale / count if term.mean else scale)
    if not weights or max(weights) < limit * min(weights):
        return None
    ratio = max(weights) / min(weights)
    text = (
        f"The {len(weights)} micro-batches of this step are averaged each on its own, over "
        f"{', '.join(number(count) for count in counts[:8])}{', ...' if len(counts) > 8 else ''} elements, and then "
        f"added with equal weight: an element of the smallest counts {number(ratio)} times as much as one of the "
        f"largest."
    )
    evidence = {"counts": list(counts[:64]), "ratio": ratio}
    return Verdict(about("GG239", cycle, text, at=cycle.backwards[0], likely=["mean_of_means"], evidence=evidence))
