"""A few steps of an optimizer from a fresh state, and what each of them changed, element by element."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checks.gradients.backward import Task, gradient_norms, trainable
from gpt_guard.checks.gradients.nonfinite import bad_parameter
from gpt_guard.checks.optimizer.coverage import base_rate

STEPS = 6
"""As many as it takes to free a row of zero-initialised factors, one for each step."""
HALF_BYTES = 2
"""Bytes of an element at which rounding swallows what is a usual update."""


@dataclass
class Steps:
    """What the steps did. `ratio` and `largest` are of the first step: the change over the weights, and its maximum.

    `matrix_ratio` is the same ratio over the matrices alone. It is that of the second step for RMSprop, whose average
    starts at 0, so that its first step is ten times too long; and 0 for a step that searches along a line.
    `kept` is, for half-precision parameters, the smallest share of the elements with a gradient that kept their value.
    """

    ratio: float = 0.0
    matrix_ratio: float = 0.0
    largest: float = 0.0
    moved: set[str] = field(default_factory=set)
    with_gradient: set[str] = field(default_factory=set)
    kept: dict[str, float] = field(default_factory=dict)
    frozen_moved: list[str] = field(default_factory=list)
    bad_gradient: bool = False
    broken: str | None = None


def take_steps(model: nn.Module, optimizer: Optimizer, task: Task, count: int = STEPS) -> Steps:
    """Step up to `count` times, until everything with a gradient has moved. Changes the model: keep its state.

    The optimizer's state is emptied first, so that no old momentum moves what has no gradient; a learning rate that a
    scheduler holds down is put to its base. Stops at a gradient that is not finite.
    """
    refresh(optimizer)
    if not model.training:
        model.train()
    result = Steps()
    everything = trainable(model)
    long_start = type(optimizer).__name__ == "RMSprop"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for index in range(count):
        found = _step(model, optimizer, task, result)
        if found is None:
            return result
        _compare(model, before, found, result, index, long_start=long_start)
        if (bad := bad_parameter(model)) is not None:
            result.broken = bad
            return result
        if result.moved >= everything.keys() and (index > 0 or not long_start):
            break
    if _needs_closure(optimizer):
        result.matrix_ratio = 0.0
    return result


def refresh(optimizer: Optimizer) -> None:
    """Empty the optimizer's state and put each group's lr to its base."""
    for group in optimizer.param_groups:
        rate = base_rate(group)
        if rate is not None and rate != group["lr"]:
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    optimizer.state.clear()


def _step(model: nn.Module, optimizer: Optimizer, task: Task, result: Steps) -> dict[str, float | None] | None:
    parameters: dict[str, Tensor] = dict(trainable(model))
    norms: dict[str, float | None] = {}

    def closure() -> Tensor:
        optimizer.zero_grad()
        for parameter in parameters.values():
            parameter.grad = None  # those that the optimizer does not hold
        with torch.enable_grad():
            loss = task.loss(model)
            if loss.requires_grad:
                loss.backward()
        norms.clear()
        norms.update(gradient_norms(parameters))
        return loss

    closure()
    if any(norm is not None and not norm < float("inf") for norm in norms.values()):
        result.bad_gradient = True
        return None
    first = dict(norms)
    _call(optimizer, closure)
    return first


def _call(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    args = (closure,) if _needs_closure(optimizer) else ()
    step: Callable[..., Any] = optimizer.step
    try:
        step(*args)
    except KeyError:
        if any(optimizer.state.values()):
            raise
        # Some (Adagrad, Rprop) make their state when they are built, and miss it now.
        rebuild_state(optimizer)
        step(*args)


def _needs_closure(optimizer: Optimizer) -> bool:
    needs = inspect.signature(optimizer.step).parameters.get("closure")
    return needs is not None and needs.default is inspect.Parameter.empty


def rebuild_state(optimizer: Optimizer) -> None:
    """Give an optimizer the state that its class makes when it is built with these groups."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    known = inspect.signature(type(optimizer).__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    optimizer.state.update(type(optimizer)(groups, **defaults).state)


@torch.no_grad()
def _compare(
    model: nn.Module,
    before: dict[str, Tensor],
    norms: dict[str, float | None],
    result: Steps,
    index: int,
    *,
    long_start: bool,
) -> None:
    squares = {"all": [0.0, 0.0], "matrices": [0.0, 0.0]}
    for name, parameter in model.named_parameters():
        old, changed = before[name], parameter != before[name]
        if bool(changed.any()):
            if parameter.requires_grad:
                result.moved.add(name)
            elif name not in result.frozen_moved:
                result.frozen_moved.append(name)
        if norms.get(name):
            result.with_gradient.add(name)
            _rounding(name, parameter, changed, result)
        if index < 2 and parameter.is_floating_point() and parameter.requires_grad and parameter.numel():
            delta, weight = parameter.double() - old.double(), old.double()
            for kind in ("all", "matrices") if parameter.dim() >= 2 else ("all",):
                squares[kind][0] += float(delta.square().sum())
                squares[kind][1] += float(weight.square().sum())
            if index == 0:
                result.largest = max(result.largest, float(delta.abs().max()))
        before[name].copy_(parameter)
    if index < 2:
        ratios = {kind: (change / weights) ** 0.5 if weights else 0.0 for kind, (change, weights) in squares.items()}
        result.ratio = ratios["all"] if index == 0 else result.ratio
        if index == 0 or long_start:
            result.matrix_ratio = ratios["matrices"]


def _rounding(name: str, parameter: Tensor, changed: Tensor, result: Steps) -> None:
    if parameter.dtype.itemsize > HALF_BYTES or parameter.grad is None:
        return
    wanted = parameter.grad.to_dense() != 0
    share = float((wanted & ~changed).sum() / wanted.sum()) if bool(wanted.any()) else 0.0
    result.kept[name] = min(share, result.kept.get(name, 1.0))
