"""Rules about clipping: too late, too early, on nothing, on scaled gradients, or with a limit that takes everything."""

from __future__ import annotations

import math

from gpt_guard.callbacks.loop_order.events import Clip, Kind
from gpt_guard.callbacks.loop_order.order_cycle import Cycle, Verdict
from gpt_guard.callbacks.loop_order.order_words import about
from gpt_guard.hooks.scaler_use import Misuse
from gpt_guard.records.render import number

# A scale near 1 has nothing to give away.
_LEAST_SCALE = 8.0


def _real(clip: Clip) -> bool:
    """Whether a call could have changed gradients: an infinite limit only measures them."""
    return clip.with_grad > 0 and clip.limit < math.inf


def clipped_after_step(cycle: Cycle) -> Verdict | None:
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
    return Verdict(about("GG231", cycle, text, at=late[0], likely=["after_step"]))


def clipped_nothing(cycle: Cycle) -> Verdict | None:
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
    return Verdict(about("GG232", cycle, text, at=at, likely=[likely], evidence=evidence))


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


def clipped_away(cycle: Cycle) -> Verdict | None:
    """GG233: a limit of zero takes every gradient away, a negative one turns it round."""
    for at, clip in cycle.clips():
        if cycle.own(at) and clip.with_grad and clip.limit <= 0.0 and not clip.used:
            does = "sets every gradient to zero" if clip.limit == 0.0 else "turns the sign of every gradient it clips"
            text = f"clip_grad_{clip.how}_ was called with a limit of {number(clip.limit)}, which {does}."
            likely = "zero" if clip.limit == 0.0 else "negative"
            return Verdict(
                about("GG233", cycle, text, at=at, likely=[likely], evidence={"limit": clip.limit}), in_a_row=1
            )
    return None


def clipped_between(cycle: Cycle) -> Verdict | None:
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
    return Verdict(about("GG234", cycle, text, at=at, likely=[likely], evidence={"micro_batches": count}))


def clipped_scaled(cycle: Cycle) -> Verdict | None:
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
    return Verdict(about("GG210", cycle, text, at=places[0], likely=["clip_before_unscale"], evidence=evidence))
