"""Rules about gradients: cleared at the wrong moment, added twice, applied twice."""

from __future__ import annotations

from itertools import pairwise

from gpt_guard.callbacks.loop_order.events import Kind
from gpt_guard.callbacks.loop_order.order_average import is_divided
from gpt_guard.callbacks.loop_order.order_cycle import Cycle, Verdict
from gpt_guard.callbacks.loop_order.order_words import about
from gpt_guard.hooks.scaler_use import Misuse
from gpt_guard.records import Severity
from gpt_guard.records.render import number

# As GradNormMonitor has it: one step may be a slip at a boundary.
_UNCLEARED = 2
_OTHERS = (Kind.OTHER_STEP, Kind.STEP, Kind.SKIP)


def cleared_in_each(cycle: Cycle) -> Verdict | None:
    """GG230: several micro-batches, and the gradients of all but the last are cleared before they are used.

    Silent where something may have used them: a step of another optimizer or a changed weight in between (SAM, inner
    loops), inputs that wanted gradients (attacks, a generator), gradients put together by hand before the step; and
    where the last ones are cleared too, which is GG208.
    An error where each loss is divided by the number of micro-batches, which only accumulation wants; a warning where
    the gradients may have been read on purpose.
    """
    backwards = cycle.backwards
    if not cycle.accumulates or cycle.touched_by_hand:
        return None
    clears = [cycle.cleared_between(one, other) for one, other in pairwise(backwards)]
    if not all(clears) or cycle.any_between(backwards[0], backwards[-1], *_OTHERS):
        return None
    if cycle.cleared_between(backwards[-1], len(cycle.events) - 1):
        return None
    if len({cycle.backward(at).weights[cycle.index] for at in backwards}) > 1:
        return None
    count = len(backwards)
    text = (
        f"{count} micro-batches went into this step, and the gradients were cleared before each of them: only the last "
        f"one counts, {count - 1} of {count} backward calls were for nothing."
    )
    severity = Severity.ERROR if is_divided(cycle) else Severity.WARNING
    evidence = {"micro_batches": count}
    at = clears[0][-1]
    return Verdict(about("GG230", cycle, text, at=at, likely=["zero_in_loop"], severity=severity, evidence=evidence))


def never_cleared(cycle: Cycle) -> Verdict | None:
    """GG209, with its lines: version counters suspect for two steps in a row, and the values that were left confirm."""
    readings = cycle.seen.readings
    in_a_row = readings.get("grads_uncleared", 0)
    if in_a_row < _UNCLEARED or not (readings.get("grads_left") and cycle.seen.grad_norm_clipped and cycle.backwards):
        return None
    first = cycle.seen.step - in_a_row + 1
    text = (
        f"Gradients were not cleared between optimizer steps: since step {first}, backward() began with the .grad that "
        f"the step before had already used ({in_a_row} steps in a row; grad norm now {number(cycle.seen.grad_norm)})."
    )
    evidence = {"first_step": first, "in_a_row": in_a_row}
    at = cycle.backwards[0]
    return Verdict(about("GG209", cycle, text, at=at, likely=["missing_zero_grad"], evidence=evidence), in_a_row=1)


def cleared_before_step(cycle: Cycle) -> Verdict | None:
    """GG208, with its lines: zero_grad() between the last backward and the step."""
    if not cycle.backwards:
        return None
    clears = cycle.cleared_between(cycle.backwards[-1], len(cycle.events) - 1)
    if not clears or cycle.seen.grad_norm_clipped or not cycle.seen.grad_norm:
        return None
    text = (
        f"backward() left a gradient norm of {number(cycle.seen.grad_norm)}; it was cleared before optimizer.step(), "
        f"which had nothing to apply."
    )
    evidence = {"norm_after_backward": cycle.seen.grad_norm}
    return Verdict(about("GG208", cycle, text, at=clears[-1], likely=["cleared"], evidence=evidence))


def backward_twice(cycle: Cycle) -> Verdict | None:
    """GG235: a backward through a loss that an earlier one of this step has gone through, into the same gradients."""
    again = [at for at in cycle.backwards if cycle.backward(at).again]
    if not again:
        return None
    text = (
        "backward() went through the same loss twice in one step, and added its gradient to the same parameters both "
        "times."
    )
    return Verdict(about("GG235", cycle, text, at=again[0], likely=["same_loss"]))


def stepped_twice(cycle: Cycle) -> Verdict | None:
    """GG236: a step on the very gradients that the step before has applied; GG211 where that was the scaler's step."""
    if not cycle.step.used or cycle.backwards or cycle.places(Kind.ZERO_GRAD, Kind.CLEARED):
        return None
    at = len(cycle.events) - 1
    if cycle.seen.readings.get("scaler.case") == Misuse.BOTH_STEPS:
        text = "optimizer.step() followed scaler.step(optimizer) on the same gradients: they are applied twice."
        return Verdict(about("GG211", cycle, text, at=at, likely=["both_steps"]), in_a_row=1)
    text = (
        f"optimizer.step() was called again without a backward() in between: the same gradients (norm "
        f"{number(cycle.seen.grad_norm_clipped)}) are applied twice."
    )
    return Verdict(about("GG236", cycle, text, at=at, likely=["called_twice"]), in_a_row=1)
