from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def watched(
    model: nn.Module, after: Callable[[int], Any], steps: int = 30, lr: float = 0.01, reads: Any = "immediate"
) -> list[Finding]:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[], reads=reads)
    with guardian:
        for step in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            after(step)
    return list(guardian.findings)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_a_snapshot_that_is_loaded_after_each_step(reads: Any) -> None:
    model = net()
    old = copy.deepcopy(model.state_dict())
    (found,) = watched(model, lambda step: model.load_state_dict(old), reads=reads)
    assert found.code == "GG311"
    assert found.step is not None
    assert found.step < 12
    assert "load_state_dict()" in found.causes[0]


def test_it_is_also_seen_when_it_begins_later() -> None:
    model = net()
    kept: dict[str, Any] = {}

    def after(step: int) -> None:
        if step == 10:
            kept.update(copy.deepcopy(model.state_dict()))
        elif step > 10:
            model.load_state_dict(kept)

    (found,) = watched(model, after)
    assert found.code == "GG311"


def test_a_snapshot_that_is_loaded_now_and_then_is_quiet() -> None:
    model = net()
    old = copy.deepcopy(model.state_dict())
    assert watched(model, lambda step: model.load_state_dict(old) if step % 3 == 2 else None) == []


def test_an_average_swapped_in_and_out_is_quiet() -> None:
    model = net()
    average = copy.deepcopy(model.state_dict())

    def after(step: int) -> None:
        live = copy.deepcopy(model.state_dict())
        for name, value in average.items():
            value.lerp_(live[name], 0.1)
        model.load_state_dict(average)
        model.load_state_dict(live)

    assert watched(model, after) == []


@torch.no_grad()
def _clip(model: nn.Module, bound: float) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-bound, bound)


def test_clipped_weights_are_quiet() -> None:
    model = net()
    assert watched(model, lambda step: _clip(model, 0.05), steps=60) == []


def test_small_steps_that_leave_the_norms_as_they_are_are_quiet() -> None:
    assert "GG311" not in {found.code for found in watched(net(), lambda step: None, lr=1e-8)}
