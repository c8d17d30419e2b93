"""What FiniteGuard says of parameters and buffers: bad before a forward used them, or made so by a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.finite_words import GUARD, amount
from gpt_guard.catalogue import finding
from gpt_guard.hooks.state import BadState
from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, TensorStats

# Below this a float32 number cannot overflow by one product with a learning rate, a decay or a gradient.
_FAR_FROM_OVERFLOW = 1e18


def bad_at_start(watch: Watch, name: str, stats: TensorStats) -> Finding:
    """A parameter was bad when the Guardian was entered."""
    return _bad_state(
        watch,
        BadState(name, watch.parameters[name], stats, True),
        "It was so when the Guardian was entered.",
        ["loaded_so"],
        {"step": watch.step, "moment": Moment.START},
    )


def bad_before_use(watch: Watch, state: BadState, user: str, known: str, here: dict[str, Any]) -> Finding:
    """A parameter or buffer was bad before this forward used it; `known` says how it was when last looked at."""
    likely = {"entry": ["loaded_so"], "good": ["changed_outside_step"], "unknown": []}[known]
    when = {
        "entry": "It was so when the Guardian was entered.",
        "good": f"It was finite when last measured: something other than optimizer.step() has changed it before step "
        f"{here['step']}.",
        "unknown": "It was so before this forward used it.",
    }[known]
    likely = likely if state.is_parameter else [cause for cause in likely if cause == "loaded_so"]
    return _bad_state(watch, state, when, likely, here, origin=f"{user} was the first to use it.")


def _bad_state(
    watch: Watch, state: BadState, when: str, likely: list[str], here: dict[str, Any], **more: Any
) -> Finding:
    # A shared parameter goes by its first name, as everywhere else.
    name = watch.name_of(state.tensor) or state.name
    module, kind = watch.owner_of(name)
    return finding(
        "GG105" if state.is_parameter else "GG107",
        f"{'Parameter' if state.is_parameter else 'Buffer'} `{name}` holds {amount(state.stats)}. {when}",
        likely=likely,
        module=module,
        module_class=kind,
        parameter=name,
        tensor=state.stats,
        guard=GUARD,
        **here,
        **more,
    )


def bad_after_step(watch: Watch, name: str, stats: TensorStats, seen: Observation, *, written: bool) -> Finding:
    """A parameter or buffer is bad after a step and was good after the one before; `written` if not only by steps."""
    here = {"step": seen.step, "moment": Moment.AFTER_STEP, "guard": GUARD}
    module, kind = watch.owner_of(name)
    named = {"module": module, "module_class": kind, "parameter": name, "tensor": stats, **here}
    if name not in watch.parameters:
        return finding(
            "GG107",
            f"Buffer `{name}` holds {amount(stats)} after step {seen.step}; it was finite after the step before.",
            likely=["batchnorm_stats"] if "running_" in name else [],
            **named,
        )
    optimizer = watch.optimizers[seen.optimizer]
    kind_of_step = type(optimizer).__name__
    cause = _how_a_step_can(optimizer, watch.parameters[name], stats)
    if written and cause is None:
        return finding(
            "GG105",
            f"Parameter `{name}` holds {amount(stats)} after step {seen.step}. Something wrote to it outside of "
            f"{kind_of_step}.step() before, and nothing in this step could make it non-finite.",
            likely=["changed_outside_step"],
            origin=f"Not {kind_of_step}.step(): gradient, lr and optimizer state are finite.",
            **named,
        )
    eps = _eps(optimizer, watch.parameters[name])
    note = f" Its eps of {eps:g} is 0 in {stats.dtype}." if cause == "adam_eps_half" and eps is not None else ""
    return finding(
        "GG106",
        f"Parameter `{name}` holds {amount(stats)} after step {seen.step} of {kind_of_step}. It was finite before the "
        f"step, and so were all gradients.{note}",
        likely=[cause] if cause is not None else [],
        origin=f"{kind_of_step}.step() made it.",
        evidence={"optimizer": kind_of_step, "eps": eps, "lr": list(seen.lr)},
        **named,
    )


def _group(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    groups = optimizer.param_groups
    return next((group for group in groups if any(other is parameter for other in group["params"])), {})


def _eps(optimizer: Optimizer, parameter: Tensor) -> float | None:
    eps = _group(optimizer, parameter).get("eps")
    return float(eps) if isinstance(eps, (int, float)) else None


def _how_a_step_can(optimizer: Optimizer, parameter: Tensor, stats: TensorStats) -> str | None:
    """The way in which a step could make a finite parameter non-finite, as a key of GG106's causes; None if it cannot.

    Reads the optimizer's state of this parameter: only after a failure.
    """
    group = _group(optimizer, parameter)
    eps = _eps(optimizer, parameter)
    # In the parameter's own dtype, as the update computes it.
    if eps is not None and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0:
        return "adam_eps_half"
    lr = float(group.get("lr", 0.0))
    if lr - lr != 0.0:
        return "lr_nonfinite"
    tensors = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
    if any(describe(value) is not None for value in tensors):
        return "state_poisoned"
    grad = parameter.grad
    if grad is not None and describe(grad) is not None:
        return "state_poisoned"
    if parameter.dtype is torch.float16:
        return "lr_overflow"
    largest = [abs(stats.finite_min or 0.0), abs(stats.finite_max or 0.0), abs(lr)]
    largest += [float(value.abs().max()) for value in (*tensors, *([] if grad is None else [grad])) if value.numel()]
    return "lr_overflow" if max(largest) > _FAR_FROM_OVERFLOW else None
