"""Optimizers that step in a way of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .parts import STEPS, Model, Setup, Trial, loss_of, texts


def lbfgs(trial: Trial) -> nn.Module:
    model = Model(trial)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            optimizer.step(closure(trial, model, optimizer, step))
    return model


def closure(trial: Trial, model: nn.Module, optimizer: Any, step: int) -> Callable[[], Tensor]:
    first = True

    def evaluated() -> Tensor:
        nonlocal first
        optimizer.zero_grad()
        loss = loss_of(model, texts(step))
        loss.backward()
        # A step starts from its first evaluation.
        if first:
            trial.norm_of(model)
        first = False
        return loss

    return evaluated


def two(trial: Trial) -> nn.Module:
    model = Model(trial)
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if not any(parameter is matrix for matrix in matrices)]
    optimizers: Any = torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)
    with trial.watch(model, optimizers):
        for step in range(STEPS):
            trial.begin_step(model)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, texts(step)).backward()
            trial.norm_of(model)
            for optimizer in optimizers:
                optimizer.step()
    return model


def fused(trial: Trial) -> nn.Module:
    model = Model(trial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            optimizer.zero_grad()
            loss_of(model, texts(step)).backward()
            trial.norm_of(model)
            optimizer.step()
    return model


def inside_backward(trial: Trial) -> nn.Module:
    """An optimizer for each parameter, stepped as soon as its gradient is complete, which is freed then."""
    model = Model(trial)
    optimizers: dict[Tensor, Any] = {
        parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()
    }
    squares: list[float] = []

    def step_now(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares.append(float(parameter.grad.norm()) ** 2)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with trial.watch(model, tuple(optimizers.values())):
        for step in range(STEPS):
            trial.begin_step(model)
            squares.clear()
            loss_of(model, texts(step)).backward()
            trial.norms.append(math.sqrt(sum(squares)))
    return model


SETUPS = (
    Setup("LBFGS, with a closure", lbfgs),
    Setup("AdamW, fused", fused),
    Setup(
        "Muon and AdamW",
        two,
        how="`Guardian(model, [muon, adamw])`",
        why={"true norm": "no: each of the two has its own, and none is over both"},
    ),
    Setup(
        "steps inside of backward",
        inside_backward,
        how="`Guardian(model, optimizers)`",
        why={"true norm": "no: of the optimizer that stepped last, as each gradient is gone when the next one comes"},
    ),
)
