"""What goes wrong, or is done on purpose, from a light step on: told as in full steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..light_loops import LIGHT, net, run, told


def test_layers_that_are_thawed_in_light_steps_are_quiet() -> None:
    model = net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)

    def between(model: nn.Sequential, step: int) -> None:
        if step in (LIGHT, LIGHT + 5):
            model[2 if step == LIGHT else 0].requires_grad_(True)

    guardian, _ = run(between, model=model, steps=60)
    assert told(guardian) == []


@pytest.mark.parametrize("alone", [True, False])
def test_values_put_back_from_a_light_step_on_are_named(alone: bool) -> None:
    kept: dict[str, Any] = {}

    def between(model: nn.Sequential, step: int) -> None:
        if step == LIGHT:
            kept.update(copy.deepcopy(model.state_dict()))
        elif step > LIGHT:
            model.load_state_dict(kept)

    guardian, _ = run(between, steps=64, alone=alone)
    ((code, step),) = told(guardian)
    assert code == "GG311"
    assert step is not None
    assert step < LIGHT + 20


def test_values_put_back_past_the_counters_are_named() -> None:
    kept: list[Tensor] = []

    def between(model: nn.Sequential, step: int) -> None:
        if step == LIGHT:
            kept.extend(parameter.detach().clone() for parameter in model.parameters())
        elif step > LIGHT:
            for parameter, old in zip(model.parameters(), kept, strict=True):
                parameter.data.copy_(old)

    guardian, _ = run(between, steps=70)
    ((code, step),) = told(guardian)
    assert code == "GG311"
    assert step is not None
    assert step < LIGHT + 20


@pytest.mark.parametrize("alone", [True, False])
def test_an_optimizer_that_stops_in_a_light_step_is_named(alone: bool) -> None:
    class Stops(torch.optim.SGD):
        done = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # broken on purpose
            Stops.done += 1
            if Stops.done <= LIGHT:
                super().step()

    guardian, _ = run(kind=Stops, steps=60, alone=alone)
    ((code, step),) = told(guardian)
    assert code == "GG301"
    assert step is not None
    assert LIGHT <= step < LIGHT + 12


def test_a_parameter_stuck_from_a_light_step_on_is_named_at_the_same_step() -> None:
    def between(model: nn.Sequential, step: int) -> None:
        if step == LIGHT:
            model[2].get_parameter("weight").register_post_accumulate_grad_hook(
                lambda weight: kept.append(weight.detach().clone())
            )

    class Forgetful(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # broken on purpose
            super().step()
            if kept:
                with torch.no_grad():
                    self.param_groups[0]["params"][2].copy_(kept[-1])

    kept: list[Tensor] = []
    light, _ = run(between, kind=Forgetful, steps=90)
    alone_found = told(light)
    kept.clear()
    full, _ = run(between, kind=Forgetful, steps=90, full=True)
    kept.clear()
    alone, _ = run(between, kind=Forgetful, steps=90, alone=True)
    assert [code for code, _ in told(full)] == ["GG304"]
    assert alone_found == told(full) == told(alone)
