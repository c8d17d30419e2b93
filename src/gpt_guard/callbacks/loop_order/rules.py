"""The rules of LoopOrder: what each says of one optimizer's cycle, and how sure it has to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from gpt_guard.callbacks.loop_order.cycle import Cycle, RuleResult
from gpt_guard.callbacks.loop_order.loss_addends import Addend
from gpt_guard.callbacks.loop_order.record import Clip, Kind, Scheduled
from gpt_guard.hooks.scaler import Misuse
from gpt_guard.records import Severity
from gpt_guard.records.render import learning_rates, number

# As GradNormMonitor has it: one step may be a slip at a boundary.
_UNCLEARED = 2
_OTHERS = (Kind.OTHER_STEP, Kind.STEP, Kind.SKIP)
# A scale near 1 has nothing to give away.
_LEAST_SCALE = 8.0
# It waits for a metric: where it stands in the step makes no difference.
_ANYWHERE = "ReduceLROnPlateau"
# Weights of a loss near 1, as label smoothing leaves them, are no division by a number of micro-batches (2 at least).
_NEAR_ONE = 0.75
_SAME = 1e-3

# Gradients: cleared at the wrong moment, added twice, applied twice.


def cleared_in_each(cycle: Cycle) -> RuleResult | None:
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
    severity = Severity.ERROR if _is_divided(cycle) else Severity.WARNING
    evidence = {"micro_batches": count}
    at = clears[0][-1]
    return cycle.result("GG230", text, at=at, likely=["zero_in_loop"], severity=severity, evidence=evidence)


def never_cleared(cycle: Cycle) -> RuleResult | None:
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
    return cycle.result("GG209", text, at=at, likely=["missing_zero_grad"], evidence=evidence, in_a_row=1)


def cleared_before_step(cycle: Cycle) -> RuleResult | None:
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
    return cycle.result("GG208", text, at=clears[-1], likely=["cleared"], evidence=evidence)


def backward_twice(cycle: Cycle) -> RuleResult | None:
    """GG235: a backward through a loss that an earlier one of this step has gone through, into the same gradients."""
    again = [at for at in cycle.backwards if cycle.backward(at).again]
    if not again:
        return None
    text = (
        "backward() went through the same loss twice in one step, and added its gradient to the same parameters both "
        "times."
    )
    return cycle.result("GG235", text, at=again[0], likely=["same_loss"])


def stepped_twice(cycle: Cycle) -> RuleResult | None:
    """GG236: a step on the very gradients that the step before has applied; GG211 where that was the scaler's step."""
    if not cycle.step.used or cycle.backwards or cycle.places(Kind.ZERO_GRAD, Kind.CLEARED):
        return None
    at = len(cycle.events) - 1
    if cycle.seen.readings.get("scaler.case") == Misuse.BOTH_STEPS:
        text = "optimizer.step() followed scaler.step(optimizer) on the same gradients: they are applied twice."
        return cycle.result("GG211", text, at=at, likely=["both_steps"], in_a_row=1)
    text = (
        f"optimizer.step() was called again without a backward() in between: the same gradients (norm "
        f"{number(cycle.seen.grad_norm_clipped)}) are applied twice."
    )
    return cycle.result("GG236", text, at=at, likely=["called_twice"], in_a_row=1)


# Clipping: too late, too early, on nothing, on scaled gradients, or with a limit that takes everything.


def _real(clip: Clip) -> bool:
    """Whether a call could have changed gradients: an infinite limit only measures them."""
    return clip.with_grad > 0 and clip.limit < math.inf


def clipped_after_step(cycle: Cycle) -> RuleResult | None:
    """GG231: clipping follows the step that it is meant for; the gradients of the next one are not clipped."""
    first = cycle.backwards[0] if cycle.backwards else len(cycle.events)
    own = [(at, clip) for at, clip in cycle.clips() if cycle.own(at) and _real(clip)]
    late = [at for at, clip in own if at < first and clip.used and not cycle.cleared_between(-1, at)]
    if not late or any(at > first for at, _ in own):
        return None
    text = (
        "Gradients were clipped after optimizer.step() had applied them, and not between backward() and step(): no "
        "step of this loop is clipped."
    )
    return cycle.result("GG231", text, at=late[0], likely=["after_step"])


def clipped_nothing(cycle: Cycle) -> RuleResult | None:
    """GG232: what is clipped has no gradient, while the optimizer steps on gradients that nothing has clipped."""
    clips = cycle.clips()
    # A step that has nothing to apply is GG208, and clipping as little is not the reason.
    if not cycle.backwards or not cycle.seen.grad_norm or not cycle.seen.grad_norm_clipped:
        return None
    # Gradients that were cleared in place are there, and hold nothing.
    clips = [
        (at, clip._replace(with_grad=0) if clip.used and cycle.cleared_between(-1, at) else clip) for at, clip in clips
    ]
    if any(cycle.own(at) and clip.with_grad for at, clip in clips):
        return None
    alone = all(event.optimizers <= {cycle.index} for event in cycle.events)
    window = cycle.backwards[-1]
    empty = [
        (at, clip)
        for at, clip in clips
        if not clip.with_grad and (alone or at > window) and (cycle.own(at) or not cycle.events[at].optimizers)
    ]
    if not empty or any(clip.with_grad for at, clip in clips if at > window):
        return None
    at, clip = empty[-1]
    text, likely = _why_nothing(cycle, at, clip)
    evidence = {"tensors": clip.tensors, "with_gradient": 0, "grad_norm": cycle.seen.grad_norm}
    return cycle.result("GG232", text, at=at, likely=[likely], evidence=evidence)


def _why_nothing(cycle: Cycle, at: int, clip: Clip) -> tuple[str, str]:
    applied = f"the step applies a norm of {number(cycle.seen.grad_norm_clipped)}, unclipped."
    if not clip.tensors:
        return f"clip_grad_{clip.how}_ was given no tensor at all: {applied}", "used_up"
    if not cycle.own(at):
        what = f"{clip.tensors} tensors that this optimizer does not hold, none of which has a gradient"
        return f"clip_grad_{clip.how}_ was given {what}: {applied}", "other_model"
    if at < cycle.backwards[0]:
        return f"Gradients were clipped before backward(), when there were none: {applied}", "before_backward"
    return f"clip_grad_{clip.how}_ was given {clip.tensors} tensors without a gradient: {applied}", "frozen"


def clipped_away(cycle: Cycle) -> RuleResult | None:
    """GG233: a limit of zero takes every gradient away, a negative one turns it round."""
    for at, clip in cycle.clips():
        if cycle.own(at) and clip.with_grad and clip.limit <= 0.0 and not clip.used:
            does = "sets every gradient to zero" if clip.limit == 0.0 else "turns the sign of every gradient it clips"
            text = f"clip_grad_{clip.how}_ was called with a limit of {number(clip.limit)}, which {does}."
            likely = "zero" if clip.limit == 0.0 else "negative"
            return cycle.result("GG233", text, at=at, likely=[likely], evidence={"limit": clip.limit}, in_a_row=1)
    return None


def clipped_between(cycle: Cycle) -> RuleResult | None:
    """GG234: partial sums of an accumulation are clipped, or unscaled, while micro-batches are still to come."""
    if not cycle.accumulates:
        return None
    first, last = cycle.backwards[0], cycle.backwards[-1]
    places = [at for at, clip in cycle.clips() if cycle.own(at) and _real(clip)] + cycle.places(Kind.UNSCALE)
    inside = [at for at in sorted(places) if first < at < last and not cycle.cleared_between(first, last)]
    if not inside:
        return None
    at, count = inside[0], len(cycle.backwards)
    done = sum(place < at for place in cycle.backwards)
    if cycle.events[at].kind is Kind.UNSCALE:
        text = (
            f"scaler.unscale_() was called after {done} of {count} micro-batches: those that follow add scaled "
            f"gradients to unscaled ones."
        )
        likely = "unscale_in_loop"
    else:
        text = (
            f"Gradients were clipped after {done} of {count} micro-batches: what was added up so far is cut, and what "
            f"follows is not, so the first micro-batches count less than the last."
        )
        likely = "clip_in_loop"
    return cycle.result("GG234", text, at=at, likely=[likely], evidence={"micro_batches": count})


def clipped_scaled(cycle: Cycle) -> RuleResult | None:
    """GG210, with its lines: clipped while the GradScaler's scale was on the gradients."""
    readings = cycle.seen.readings
    scale = readings.get("scaler.scale")
    if readings.get("scaler.case") != Misuse.CLIPPED_SCALED or not scale or scale < _LEAST_SCALE:
        return None
    places = [at for at, clip in cycle.clips() if cycle.own(at) and _real(clip) and clip.scaled]
    before, after = cycle.seen.grad_norm, cycle.seen.grad_norm_clipped
    if not places or not before or not after or not after < before < math.inf:
        return None
    text = (
        f"Gradients were clipped to a norm of {number(after * scale)} while they were still multiplied by the "
        f"GradScaler's scale of {number(scale)}: scaler.step() then divided them, and {number(after)} is applied of a "
        f"true norm of {number(before)}."
    )
    evidence = {"grad_norm": before, "applied": after, "scale": scale}
    return cycle.result("GG210", text, at=places[0], likely=["clip_before_unscale"], evidence=evidence)


# scheduler.step(): before the step it belongs after, once per micro-batch, or for another optimizer.


def _calls(cycle: Cycle, *, foreign: bool = False) -> list[tuple[int, Scheduled]]:
    found = [(at, cycle.events[at].detail) for at in cycle.places(Kind.SCHEDULER)]
    return [(at, call) for at, call in found if call.foreign is foreign and call.name != _ANYWHERE]


def scheduled_first(cycle: Cycle) -> RuleResult | None:
    """GG411: scheduler.step() comes before the optimizer's step, in each step.

    Either between backward and step, or at the top of the loop: then the very first call comes before any step, and
    the later ones from the same line. Once before the loop, or once an epoch, is as it should be.
    """
    calls = _calls(cycle)
    if len(calls) != 1 or not cycle.backwards:
        return None
    at, call = calls[0]
    between = at > cycle.backwards[-1]
    key = f"scheduled_first {cycle.line(at)}"
    left_out = cycle.last is not None and cycle.last.kind is Kind.SKIP
    if not between and (call.stepped or left_out) and key not in cycle.running:
        # A step that the GradScaler has left out is one that the schedule follows, as torch's own loop has it.
        return None
    text = (
        f"{call.name}.step() was called before optimizer.step(): the first value of the schedule is never used, and "
        f"each step is made with the learning rate of the next one (now {learning_rates(cycle.seen.lr)})."
    )
    key = "between" if between else key
    return cycle.result("GG411", text, at=at, likely=["wrong_order"], cause_id=_cause(cycle, call), key=key)


def scheduled_in_each(cycle: Cycle) -> RuleResult | None:
    """GG405, with its lines: once per micro-batch, while the optimizer steps once for several."""
    calls = _calls(cycle)
    if len(calls) < 2 or len(calls) != len(cycle.backwards) or len({str(cycle.line(at)) for at, _ in calls}) > 1:
        return None
    ends = [*cycle.backwards[1:], len(cycle.events)]
    turns = zip(cycle.backwards, calls, ends, strict=True)
    if not all(start < at < stop for start, (at, _), stop in turns):
        return None
    at, call = calls[0]
    text = f"{call.name}.step() was called {len(calls)} times for one optimizer step: once for each micro-batch."
    evidence = {"scheduler": call.name, "moved": len(calls), "micro_batches": len(calls)}
    cause = _cause(cycle, call)
    return cycle.result("GG405", text, at=at, likely=["per_micro_batch"], cause_id=cause, evidence=evidence)


def scheduled_another(cycle: Cycle) -> RuleResult | None:
    """GG404, with its line: it drives an optimizer that holds the same parameters and never steps."""
    calls = [(at, call) for at, call in _calls(cycle, foreign=True) if not call.stepped]
    if not calls:
        return None
    at, call = calls[0]
    text = (
        f"{call.name} drives another optimizer than the one that this loop steps: that one holds the same parameters, "
        f"and has made no step."
    )
    return cycle.result("GG404", text, at=at, likely=["rebuilt"], cause_id=call.name)


def _cause(cycle: Cycle, call: Scheduled) -> str:
    return f"optimizer {cycle.index}, {call.name}"


# Accumulation: whether the losses of the micro-batches add up to the loss of the whole batch.


def _main_addends(cycle: Cycle) -> list[tuple[Addend, float]]:
    """The largest addend of each micro-batch's loss, with its factor; empty where that is not the whole truth."""
    if not cycle.accumulates or cycle.touched_by_hand or cycle.seen.skipped:
        return []
    found: list[tuple[Addend, float]] = []
    for at in cycle.backwards:
        known = [(addend, cycle.scaled(addend)) for addend in cycle.backward(at).addends]
        sure = [(addend, abs(scale)) for addend, scale in known if scale is not None]
        if not sure or len(sure) < len(known):
            return []
        found.append(max(sure, key=lambda each: each[1]))
    # Several losses that share a line are several tasks.
    return found if len({addend.kind for addend, _ in found}) == 1 else []


def _cleared(cycle: Cycle) -> bool:
    """Whether there is no sum: gradients were cleared between the micro-batches."""
    return bool(cycle.backwards and cycle.cleared_between(cycle.backwards[0], cycle.backwards[-1]))


def _is_divided(cycle: Cycle) -> bool:
    """Whether each micro-batch's loss is known to be divided by their number: accumulation is meant."""
    main = _main_addends(cycle)
    return bool(main) and all(_divides(cycle, addend, len(main)) for addend, _ in main)


def not_divided(cycle: Cycle) -> RuleResult | None:
    """GG238: each micro-batch's mean counts in full, so the gradient is that many times the mean gradient.

    Only worth knowing: a learning rate may be meant for the sum, truncated backpropagation adds chunks on purpose, and
    Adam divides the factor out again. A warning where clipping makes it matter: the norm is above the limit only
    because of the factor.
    """
    count = len(cycle.backwards)
    main = [] if _cleared(cycle) else _main_addends(cycle)
    if not main or not all(addend.mean and _NEAR_ONE <= scale <= 1.0 / _NEAR_ONE for addend, scale in main):
        return None
    if any(_divides(cycle, addend, count) for addend, _ in main):
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
    severity = Severity.INFO if cut is None else Severity.WARNING
    evidence = {"micro_batches": count, "grad_norm": norm, "limit": cut}
    at = cycle.backwards[0]
    return cycle.result("GG238", text, at=at, likely=["not_divided"], severity=severity, evidence=evidence)


def _divides(cycle: Cycle, addend: Addend, count: int) -> bool:
    """Whether one of the factors is the division by the number of micro-batches."""
    values = ((cycle.number(factor.value), factor.power) for factor in addend.factors)
    return any(value and abs(value**power * count - 1.0) < _SAME for value, power in values)


def unequal_means(cycle: Cycle) -> RuleResult | None:
    """GG239: means over different numbers of elements, added with equal weight."""
    weights: list[float] = []
    counts: list[float] = []
    for addend, scale in [] if _cleared(cycle) else _main_addends(cycle):
        count = cycle.number(addend.count)
        if not count or count <= 0.0:
            return None
        counts.append(count)
        weights.append(scale / count if addend.mean else scale)
    if not weights or max(weights) < cycle.uneven * min(weights):
        return None
    ratio = max(weights) / min(weights)
    text = (
        f"The {len(weights)} micro-batches of this step are averaged each on its own, over "
        f"{', '.join(number(count) for count in counts[:8])}{', ...' if len(counts) > 8 else ''} elements, and then "
        f"added with equal weight: an element of the smallest counts {number(ratio)} times as much as one of the "
        f"largest."
    )
    evidence = {"counts": list(counts[:64]), "ratio": ratio}
    return cycle.result("GG239", text, at=cycle.backwards[0], likely=["mean_of_means"], evidence=evidence)


RULES: tuple[Callable[[Cycle], RuleResult | None], ...] = (
    cleared_in_each,
    never_cleared,
    cleared_before_step,
    backward_twice,
    stepped_twice,
    clipped_after_step,
    clipped_nothing,
    clipped_away,
    clipped_between,
    clipped_scaled,
    scheduled_first,
    scheduled_in_each,
    scheduled_another,
    not_divided,
    unequal_means,
)
"""In the order in which they are asked."""
