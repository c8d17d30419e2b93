"""The ways in which a step of an optimizer can make finite parameters non-finite, told from its state and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation, TensorStats

# Below this a float32 number cannot overflow by one product with a learning rate, a decay or a gradient.
_FAR_FROM_OVERFLOW = 1e18
# Decoupled decay multiplies by 1 - lr * weight_decay: from here on its size is above 1.
_FLIPS = 2.0
_NEAR = 0.1
# State in which optimizers of torch keep averages or sums of squared gradients: never negative.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
# What these make of finite numbers is finite, but for the ways that `step_causes` knows.
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def could_not_have(watch: Watch, optimizer: Optimizer, name: str) -> bool:
    """Whether the newest step has not made a parameter so, unless `step_causes` finds a way; reads no value.

    Only of optimizers that are known, and where nothing else has written to it in the step.
    """
    return type(optimizer) in _KNOWN and watch.versions.as_often(name)


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
    # In the parameter's own dtype, as the update computes it.
    if eps is not None and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0:
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
