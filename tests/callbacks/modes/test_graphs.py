"""Evaluation that forgot no_grad, and loops that call the model often for good reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

Loop = Callable[[nn.Module, Optimizer], None]


def net(p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(p), nn.Linear(8, 2))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,)))


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def validated(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(4):
        step(model, optimizer)
    losses = [loss_of(model).item() for _ in range(3)]
    assert len(losses) == 3


def in_eval_mode(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(4):
        step(model, optimizer)
    model.eval()
    for _ in range(4):
        loss_of(model).item()
    model.train()


def run(model: nn.Module, loop: Loop, times: int = 3) -> Sequence[Finding]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[EvalModeAssert()], sinks=[]) as guardian:
        for _ in range(times):
            loop(model, optimizer)
    return guardian.findings


@pytest.mark.parametrize("times", [1, 3])
def test_neither_eval_nor_no_grad(times: int) -> None:
    (found,) = run(net(), validated, times)
    assert (found.code, found.step, found.severity) == ("GG507", 4, Severity.WARNING)
    assert "2 of 2 mode-sensitive modules in training mode" in found.seen
    assert found.where is not None
    assert "loss_of" in found.where.function
    assert "Neither model.eval()" in found.causes[0]


def test_no_grad_alone_is_missing() -> None:
    (found,) = run(net(), in_eval_mode)
    assert (found.code, found.severity, found.module) == ("GG507", Severity.INFO, None)


def test_a_model_in_which_mode_changes_nothing_is_silent() -> None:
    assert run(plain(), validated) == ()


def with_no_grad(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(4):
        step(model, optimizer)
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            loss_of(model)
    model.train()


def unrolled(model: nn.Module, optimizer: Optimizer) -> None:
    """Ever more calls for one loss."""
    for calls in (1, 1, 1, 1, 5, 9):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for _ in range(calls):
            loss = loss + loss_of(model)
        loss.backward()
        optimizer.step()


def always_twice(model: nn.Module, optimizer: Optimizer) -> None:
    """A second forward in each step, whose graph is not used."""
    for _ in range(6):
        target = model(torch.randn(8, 4)).detach()
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(8, 4)), target).backward()
        optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer) -> None:
    for micro_batches in (1, 1, 1, 1, 4):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss_of(model).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [with_no_grad, unrolled, always_twice, accumulated])
def test_loops_that_mean_it_are_silent(loop: Loop) -> None:
    assert run(net(), loop, 4) == ()
