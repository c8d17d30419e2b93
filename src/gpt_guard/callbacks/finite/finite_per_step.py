"""FiniteGuard where readings wait for the step: what they show, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpt_guard.callbacks.finite.blame import Blame
from gpt_guard.callbacks.finite.finite_context import Context
from gpt_guard.callbacks.finite.finite_gradients import bad_gradient
from gpt_guard.callbacks.finite.finite_late import LateReadings
from gpt_guard.callbacks.finite.finite_loss import loss_outside
from gpt_guard.callbacks.finite.finite_outside import hidden_from
from gpt_guard.callbacks.finite.finite_told import Told
from gpt_guard.callbacks.finite.finite_verdict import verdict
from gpt_guard.hooks.state import StateWatch
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation


def before_now(watch: Watch) -> int:
    """How many backward calls of the step being prepared have come before, where reading is free: by what they left.

    To be asked when something is bad: looks at each parameter.
    """
    fresh = not watch.since_step or all(parameter.grad is None for parameter in watch.tracked.values())
    return 0 if fresh else watch.micro_batch


def here_in(watch: Watch, micro_batch: int, *, evaluation: bool) -> dict[str, Any]:
    """Step and micro-batch of a forward, by the field names of Finding."""
    place = {"step": watch.step, "moment": Moment.FORWARD, "evaluation": evaluation}
    return place if evaluation else {**place, "micro_batch": micro_batch}


def judge_late(
    watch: Watch, late: LateReadings, state: StateWatch, context: Context, told: Told, seen: Observation
) -> Iterator[Finding]:
    """One bad forward is told once, and nothing that follows from it in the same step."""
    for index, shown, micro_batch, evaluation in late.masks(watch, seen.readings):
        context.note_mask(watch, index, shown, here_in(watch, micro_batch, evaluation=evaluation))
    for trouble in late.troubles(watch, seen.readings, state.masks):
        if isinstance(trouble.what, Blame):
            told.step = told.step or not trouble.evaluation
            here = here_in(watch, trouble.micro_batch, evaluation=trouble.evaluation)
            yield from verdict(watch, state, context, trouble.what, None, here)
        elif not told.step:
            told.step = True
            here = {"step": watch.step, "micro_batch": trouble.micro_batch}
            if isinstance(trouble.what, dict):
                yield bad_gradient(watch, trouble.what, trouble.loss, here)
            else:
                here |= {"moment": Moment.BEFORE_BACKWARD}
                masks, diverging = context.mask_names(watch), context.diverging
                hidden = hidden_from(watch, late=True)
                why = hidden.why if hidden else None
                yield loss_outside(watch, trouble.what, None, None, masks, here, diverging=diverging, why=why)
