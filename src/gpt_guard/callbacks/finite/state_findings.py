"""What FiniteGuard says of parameters and buffers: bad before a forward used them, or made so by a step, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.finite.forward_findings import GUARD, amount
from gpt_guard.catalogue import finding
from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.hooks.weights import BadState, StateWatch
from gpt_guard.records import Finding, Moment, Observation, TensorStats

_LISTED = 10
# Tables that are computed once and never updated.
_TABLES = ("inv_freq", "cos", "sin", "cos_cached", "sin_cached", "freqs", "freqs_cis", "pe", "alibi")


def bad_at_step(watch: Watch, name: str, stats: TensorStats, here: dict[str, Any]) -> Finding:
    """A parameter was bad when the Guardian was entered, still is, and is about to be stepped."""
    when = "It was so when the Guardian was entered, and has a gradient now."
    state = BadState(name, watch.parameters[name], stats, True)
    return _bad_state(watch, state, when, ["loaded_so", "uninitialised"], here)


def bad_before(watch: Watch, state: StateWatch, bad: BadState, origin: str, here: dict[str, Any]) -> Iterator[Finding]:
    """A parameter or buffer was bad before this forward used it; nothing if it has been spoken of already."""
    name = watch.name_of(bad.tensor) or bad.name
    if name not in state.told:
        known = "entry" if name in state.at_start else "good" if state.watches(name) else "unknown"
        state.ignore(name)
        yield _before_use(watch, bad, origin, known, here)


def changed_outside(watch: Watch, bad: Sequence[BadState]) -> Iterator[Finding]:
    """What has become bad since the newest step, and no forward has used yet: one finding for each kind."""
    for is_parameter in (True, False):
        same = [each for each in bad if each.is_parameter is is_parameter]
        if not same:
            continue
        when = f"It was finite after step {watch.step - 1}: something other than optimizer.step() has changed it since."
        if len(same) > 1:
            when += f" {len(same) - 1} more {'parameters' if is_parameter else 'buffers'} too."
        likely = ["changed_outside_step"] if is_parameter else _buffer_causes(watch, same[0].name)
        yield _bad_state(watch, same[0], when, likely, {"step": watch.step, "moment": Moment.AFTER_STEP})


def _before_use(watch: Watch, state: BadState, origin: str, known: str, here: dict[str, Any]) -> Finding:
    """`known` says how it was when last looked at."""
    likely = {"entry": ["loaded_so", "uninitialised"], "good": ["changed_outside_step"], "unknown": []}[known]
    when = {
        "entry": "It was so when the Guardian was entered.",
        "good": f"It was finite when last measured: something other than optimizer.step() has changed it before step "
        f"{here['step']}.",
        "unknown": "It was so before this forward used it.",
    }[known]
    if not state.is_parameter:
        # What no checkpoint holds was not loaded from one.
        built = ["uninitialised"] if _is_unsaved(watch, state.name) else ["loaded_so"]
        likely = (built if known == "entry" else []) + _buffer_causes(watch, state.name)
    return _bad_state(watch, state, when, likely, here, origin=origin)


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


def _is_unsaved(watch: Watch, name: str) -> bool:
    """Whether a buffer is registered with persistent=False."""
    path, _, key = name.rpartition(".")
    return key in getattr(watch.model.get_submodule(path), "_non_persistent_buffers_set", ())


def _buffer_causes(watch: Watch, name: str) -> list[str]:
    """GG107's causes by the class of the module that holds a buffer."""
    path, _, key = name.rpartition(".")
    try:
        owner = watch.model.get_submodule(path)
    except AttributeError:
        return []
    if isinstance(owner, nn.modules.batchnorm._NormBase):
        return ["batchnorm_stats"]
    return ["computed"] if key in _TABLES else ["running_average", "computed"]


def bad_after_step(watch: Watch, bad: Mapping[str, TensorStats], seen: Observation, written: set[str]) -> list[Finding]:
    """Parameters and buffers that are bad after a step and were good after the one before: one finding for each kind.

    `written` names those that not only steps have written to, as write counters tell.
    """
    optimizer = watch.optimizers[seen.optimizer]
    groups: dict[str, list[str]] = {"GG105": [], "GG106": [], "GG107": []}
    for name, stats in bad.items():
        if name not in watch.parameters:
            groups["GG107"].append(name)
        elif name in written and not step_causes(optimizer, watch.parameters[name], stats, seen):
            groups["GG105"].append(name)
        else:
            groups["GG106"].append(name)
    return [_after_step(watch, code, names, bad[names[0]], seen) for code, names in groups.items() if names]


def _after_step(watch: Watch, code: str, names: list[str], stats: TensorStats, seen: Observation) -> Finding:
    first, *others = names
    module, kind = watch.owner_of(first)
    optimizer = watch.optimizers[seen.optimizer]
    stepper = type(optimizer).__name__
    evidence: dict[str, Any] = {"bad_tensors": names[:_LISTED], "bad_tensor_count": len(names)} if others else {}
    origin, likely, shown = None, ["changed_outside_step"], list[str]()
    held = f"`{first}` holds {amount(stats)} after step {seen.step}"
    if code == "GG107":
        seen_text = f"Buffer {held}; it was finite after the step before."
        likely = _buffer_causes(watch, first)
    elif code == "GG105":
        seen_text = (
            f"Parameter {held}. Something wrote to it outside of {stepper}.step() before, and neither lr, gradient, "
            f"hyperparameters nor optimizer state of this step were seen to be able to make it so."
        )
        origin = f"Most likely what wrote to it outside of {stepper}.step()."
    else:
        eps = eps_of(optimizer, watch.parameters[first])
        shown = step_causes(optimizer, watch.parameters[first], stats, seen)
        likely = [*shown] or ["state_poisoned", "lr_overflow"]
        norm = seen.grad_norm_clipped
        # LBFGS evaluates its closure again and again: the norm is that of the first time.
        all_seen = norm is not None and math.isfinite(norm) and not isinstance(optimizer, torch.optim.LBFGS)
        known = ", and so were all gradients" if all_seen else ""
        note = f" Its eps of {eps:g} is 0 in {stats.dtype}." if likely[0] == "adam_eps_half" else ""
        seen_text = f"Parameter {held} of {stepper}. It was finite before the step{known}.{note}"
        origin = f"{stepper}.step() made it."
        evidence |= {"optimizer": stepper, "eps": eps, "lr": list(seen.lr)}
    if others:
        what = "buffer" if code == "GG107" else "parameter"
        seen_text += f" {len(others)} other {what}{'s' if len(others) > 1 else ''} became non-finite in the same step."
    return finding(
        code,
        seen_text,
        likely=likely,
        shown=shown,
        unlikely=["adam_eps_half"] if code == "GG106" and stats.dtype != "float16" else (),
        module=module,
        module_class=kind,
        parameter=first,
        tensor=stats,
        origin=origin,
        evidence=evidence,
        step=seen.step,
        moment=Moment.AFTER_STEP,
        guard=GUARD,
    )


# Below this a float32 number cannot overflow by one product with a learning rate, a decay or a gradient.
_FAR_FROM_OVERFLOW = 1e18
# Decoupled decay multiplies by 1 - lr * weight_decay: from here on its size is above 1.
_FLIPS = 2.0
_NEAR = 0.1
# State in which optimizers of torch keep averages or sums of squared gradients: never negative.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")


def _group(optimizer: Optimizer, parameter: Tensor) -> tuple[int, dict[str, Any]]:
    for place, group in enumerate(optimizer.param_groups):
        if any(other is parameter for other in group["params"]):
            return place, group
    return len(optimizer.param_groups), {}


def eps_of(optimizer: Optimizer, parameter: Tensor) -> float | None:
    """The eps of the parameter's group, if it has one."""
    eps = _group(optimizer, parameter)[1].get("eps")
    return float(eps) if isinstance(eps, (int, float)) else None


def step_causes(optimizer: Optimizer, parameter: Tensor, stats: TensorStats, seen: Observation) -> list[str]:
    """The ways in which a step could make a finite parameter non-finite, as keys of GG106's causes; none if it cannot.

    Reads the optimizer's state of this parameter: only after a failure. By then a backward may have followed: lr and
    gradients are those that were observed before the step.
    """
    place, group = _group(optimizer, parameter)
    eps = eps_of(optimizer, parameter)
    state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
    lr = seen.lr[place] if place < len(seen.lr) else 0.0
    decay, norm = _number(group.get("weight_decay")), seen.grad_norm_clipped or 0.0
    half = parameter.dtype is torch.float16
    found: list[str] = []
    if lr - lr != 0.0:
        found.append("lr_nonfinite")
    if not all(map(math.isfinite, _settings(group))):
        found.append("setting_nonfinite")
    # In the parameter's own dtype, as the update computes it.
    if eps is not None and math.isfinite(eps) and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0:
        found.append("adam_eps_half" if half and eps else "eps_zero")
    if _poisoned(state) or norm - norm != 0.0:
        found.append("state_poisoned")
    if any(key in _SQUARES and bool((value == math.inf).any()) for key, value in state.items()):
        found.append("square_overflow")
    if isinstance(optimizer, torch.optim.LBFGS):
        found.append("line_search")
    if lr * decay > _FLIPS:
        found.append("weight_decay")
    momentum = state.get("momentum_buffer")
    if momentum is not None and _largest(momentum) > _NEAR * torch.finfo(momentum.dtype).max:
        found.append("momentum_overflow")
    largest = [abs(stats.finite_min or 0.0), abs(stats.finite_max or 0.0), abs(lr), norm]
    largest += [_largest(value) for value in state.values()]
    if half or max(largest) > _FAR_FROM_OVERFLOW:
        found.append("lr_overflow")
    return found


def _settings(group: Mapping[str, Any]) -> Iterator[float]:
    """The numbers of a group beside its lr, such as weight_decay, eps and both betas."""
    for key, value in group.items():
        if key not in ("params", "lr", "initial_lr"):
            yield from (_number(each) for each in (value if isinstance(value, (tuple, list)) else (value,)))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float, Tensor)) else 0.0


def _poisoned(state: Mapping[str, Tensor]) -> bool:
    """Whether this state was bad before a step with finite gradients: such a step makes neither NaN nor negatives."""
    for key, value in state.items():
        stats = describe(value)
        if stats is not None and (stats.nan or key not in (*_SQUARES, "momentum_buffer")):
            return True
        if key in _SQUARES and not value.is_complex() and bool((value < 0).any()):
            return True
        if key == "step" and bool((value < 1).any()):
            return True
    return False
