"""The findings of GradNormMonitor about the total norm, put into words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from gpt_guard.callbacks.gradients.level import Standing
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Observation, Severity
from gpt_guard.records.render import learning_rates, number

_LIKELY = {
    "new level": ["new_level"],
    "contained": ["odd_batch"],
    "memorised": ["memorised"],
    "spike": ["lr_too_high"],
    "sudden": ["odd_batch", "no_clipping", "lr_too_high"],
}


def zero_norm(seen: Observation, in_a_row: int, *, trained: bool, dwindled: bool = False) -> Finding:
    """GG201: gradients are there, and all of them are zero.

    A loss of 0 in a run that had losses and gradients before is what hinge, triplet and sparse rewards end in, above
    all where it `dwindled`.
    """
    often = f" for {in_a_row} steps in a row" if in_a_row > 1 else ""
    return _about(
        "GG201",
        seen,
        f"The gradient norm is exactly 0 over {len(seen.grad_norms)} parameters{often}, at loss {number(seen.loss)}.",
        likely=["constant_output"] if seen.loss else ["learned"] if dwindled else ["loss_zero", "learned"],
        severity=Severity.INFO if trained and not seen.loss else Severity.WARNING,
        cause_id=f"optimizer {seen.optimizer}{'' if seen.loss else ', loss 0'}",
        evidence={"loss": seen.loss, "in_a_row": in_a_row, "lr": list(seen.lr)},
    )


def no_graph(loss_value: str, step: int) -> Finding:
    """GG220: backward() on a loss that is a leaf; no gradient can come from it."""
    return finding(
        "GG220",
        f"backward() was called on a leaf tensor of shape {loss_value}: the loss has no graph (grad_fn is None) and is "
        f"no parameter, so this backward() gives no gradient to anything. requires_grad=True was set on it by hand, "
        f"which silences torch's own error.",
        likely=["detached_loss", "no_grad"],
        step=step,
        moment=Moment.BEFORE_BACKWARD,
    )


def nothing_to_apply(
    seen: Observation, in_a_row: int, held: int, backwards: int, cut_at: tuple[int, ...] | None
) -> Finding:
    """GG208: no parameter of the optimizer has a gradient at the step; `cut_at` is where the loss's graph ends."""
    cleared = bool(backwards and seen.grad_norm)
    if cleared:
        how = f"backward() left a gradient norm of {number(seen.grad_norm)}, and it was gone before the step"
    elif backwards:
        how = "backward() reached the model since the last step, but none of these parameters"
    elif cut_at is not None:
        how = (
            f"backward() was called on a loss that depends on no parameter of the model. Its graph ends in a tensor of "
            f"shape {list(cut_at)} that requires a gradient and was computed without one"
        )
    else:
        how = "no backward() reached the model since the last step"
    return _about(
        "GG208",
        seen,
        f"optimizer.step() had no gradient to apply for any of its {held} parameters in {in_a_row} "
        f"steps in a row: {how}.",
        likely=["cleared"]
        if cleared
        else ["other_tensors"]
        if backwards
        else ["detached_loss"]
        if cut_at
        else ["other_model"],
        evidence={"backward_calls": backwards, "norm_after_backward": seen.grad_norm if cleared else None},
    )


def uncleared(seen: Observation, in_a_row: int) -> Finding:
    """GG209: gradients that a step has used were still there when the next backward began."""
    first = seen.step - in_a_row + 1
    return _about(
        "GG209",
        seen,
        f"Gradients were not cleared between optimizer steps: since step {first}, backward() began with the .grad that "
        f"the step before had already used ({in_a_row} steps in a row; grad norm now {number(seen.grad_norm)}).",
        likely=["missing_zero_grad"],
        evidence={"first_step": first, "in_a_row": in_a_row},
    )


def overflowing(seen: Observation, norms: Mapping[str, float]) -> Finding:
    """GG221: the norm is inf and each element is finite; `norms` are the exact ones of those that overflow."""
    largest = sorted(norms, key=lambda name: -norms[name])[:3]
    exact = math.hypot(*norms.values())
    parts = ", ".join(f"{name} ({number(norms[name])})" for name in largest)
    known = f"The exact norm is {number(exact)}. Largest: {parts}."
    if not exact:
        known = f"It overflows in {', '.join(largest)}."
    if not seen.grad_norm_clipped:
        known += " Clipping by it made every gradient zero: nothing of this step is left."
    return _about(
        "GG221",
        seen,
        f"The gradient norm overflows to inf in {len(norms)} parameters, but each element "
        f"is finite, at loss {number(seen.loss)} and lr {learning_rates(seen.lr)}. {known}",
        evidence={"exact_norm": exact or None, "norms": {name: norms[name] for name in largest}, "lr": list(seen.lr)},
    )


def above_limit(seen: Observation, limit: float) -> Finding:
    """GG207: above the absolute limit that the user gave."""
    return _about(
        "GG207",
        seen,
        f"The gradient norm is {number(seen.grad_norm)}, above the limit warn_above={number(limit)}, at lr "
        f"{learning_rates(seen.lr)}.{_largest(seen)}",
        evidence={"grad_norm": seen.grad_norm, "warn_above": limit, "largest": dict(seen.largest_grads())},
    )


def too_high(
    seen: Observation,
    standing: Standing,
    kind: str,
    spike_factor: float,
    *,
    lasts: bool,
    loss_after: float | None = None,
) -> Finding:
    """GG203: far above the run's own level.

    Only worth knowing unless it `lasts`, where clipping brought it back to that level, or where the loss is nearly gone
    anyway. A `kind` of "sudden", with the loss in the same step, is first of all an odd batch. `loss_after` is that of
    the step after it, where it is far above the usual.
    """
    applied = seen.grad_norm_clipped
    contained = bool(seen.clipped) and applied is not None and applied < spike_factor * standing.median
    then = f" Clipping left {number(applied)} of it." if seen.clipped else ""
    if standing.adopted:
        then += f" It has been there for {standing.streak} steps and counts as the usual level from now on."
    elif loss_after is not None:
        then += f" The loss of the next step is {number(loss_after)}, far above those before."
    elif standing.streak > 1:
        then += f" It has been so for {standing.streak} steps in a row."
    kind = "new level" if standing.adopted else "contained" if contained else kind
    return _about(
        "GG203",
        seen,
        f"{_against(seen, standing)}, at loss {number(seen.loss)} and lr {learning_rates(seen.lr)}."
        f"{then}{_largest(seen)}",
        likely=_LIKELY[kind],
        severity=Severity.WARNING if kind in ("spike", "sudden") and lasts else Severity.INFO,
        cause_id=f"optimizer {seen.optimizer}, {kind if lasts else 'once'}",
        evidence=_figures(seen, standing) | {"applied": applied, "largest": dict(seen.largest_grads())},
    )


def too_low(seen: Observation, standing: Standing, loss_before: float | None) -> Finding:
    """GG204: far below the run's own level for many steps, and the loss is no better for it."""
    return _about(
        "GG204",
        seen,
        f"{_against(seen, standing)}, for {standing.streak} steps in a row. The loss has not fallen with it: "
        f"{number(loss_before)} before, {number(seen.loss)} now.",
        evidence=_figures(seen, standing) | {"in_a_row": standing.streak, "loss": [loss_before, seen.loss]},
    )


def _about(code: str, seen: Observation, text: str, **fields: Any) -> Finding:
    fields.setdefault("cause_id", f"optimizer {seen.optimizer}")
    return finding(code, text, step=seen.step, moment=Moment.BEFORE_STEP, **fields)


def _against(seen: Observation, standing: Standing) -> str:
    sigmas = (
        f"{standing.sigmas:.0f} robust standard deviations off" if math.isfinite(standing.sigmas) else "never varied"
    )
    return (
        f"The gradient norm is {number(seen.grad_norm)}, {number(standing.factor)} times the usual "
        f"{number(standing.median)} ({sigmas})"
    )


def _figures(seen: Observation, standing: Standing) -> dict[str, JsonValue]:
    return {
        "grad_norm": seen.grad_norm,
        "usual": standing.median,
        "factor": standing.factor,
        "sigmas": standing.sigmas,
        "lr": list(seen.lr),
    }


def _largest(seen: Observation) -> str:
    """The parameters that make up the norm, by name."""
    parts = [f"{name} ({number(norm)})" for name, norm in seen.largest_grads().items()]
    return f" Largest: {', '.join(parts)}." if parts else ""
