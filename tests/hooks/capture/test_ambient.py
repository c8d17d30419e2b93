"""Surroundings of a forward: put back for another, what a light step takes over, and that what has changed is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.capture.execution_context import Surroundings, surrounded_by
from gpt_guard.hooks.modes import ModeLog
from gpt_guard.hooks.pace import Pace

from ..dropping_net import Net


def test_a_forward_in_its_surroundings_is_the_forward_that_it_was() -> None:
    model, x = Net(), torch.ones(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Surroundings(model).take()
        first = model(x)
    model.eval()
    torch.rand(7)
    state = torch.get_rng_state()
    with torch.no_grad(), surrounded_by(model, ambient):
        again = model(x)
        assert torch.is_grad_enabled()
        assert model.drop.training
    assert again.dtype is torch.bfloat16
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")


def test_the_cache_of_an_autocast_that_is_running_is_neither_read_nor_written() -> None:
    model, x = Net(), torch.ones(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Surroundings(model).take()
        first: Any = model(x)
        with torch.no_grad():
            model.layer.weight.fill_(2)
        with surrounded_by(model, ambient):
            again = model(x)
        assert torch.is_autocast_cache_enabled()
        assert torch.equal(model(x).isfinite(), first.isfinite())
    assert not torch.equal(first, again)


def test_where_a_generator_cannot_be_read_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is recorded."""

    def refuse() -> Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    model = Net()
    surroundings = Surroundings(model)
    monkeypatch.setattr(surroundings, "_random", [("cpu", torch.default_generator.get_state), ("cuda:0", refuse)])
    ambient = surroundings.take()
    assert ambient.random == {}
    assert ambient.training == (True, True, True)
    with surrounded_by(model, ambient):
        model(torch.ones(2, 3))


# Light steps.


class Light:
    """The surroundings of a small model, in a light step, after a full one."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))
        self.log = ModeLog(self.model)
        self.pace = Pace(light=True)
        self.surroundings = Surroundings(self.model, self.log, self.pace)
        self.first = self.surroundings.take()
        self.pace.full = False

    def flags(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self.model.modules())

    def assign(self, *, training: bool) -> None:
        for module in self.model.modules():
            module.training = training

    def full_step(self) -> tuple[bool, ...]:
        self.pace.full = True
        found = self.surroundings.take().training
        self.pace.full = False
        return found


@pytest.fixture
def light() -> Iterator[Light]:
    made = Light()
    made.log.open()
    yield made
    made.log.close()


def test_a_light_step_takes_over_what_nobody_has_changed(light: Light) -> None:
    again = light.surroundings.take()
    assert again.training is light.first.training
    assert again.training == light.flags()
    assert again.autocast == light.first.autocast
    assert light.surroundings.revised(again) is again


def test_each_forward_has_the_random_state_of_its_own(light: Light) -> None:
    first = light.surroundings.take()
    torch.rand(1)
    state = torch.get_rng_state()
    second = light.surroundings.take()
    assert not torch.equal(first.random["cpu"], second.random["cpu"])
    assert torch.equal(second.random["cpu"], state)


@pytest.mark.parametrize("part", ["", "1", "1.0"])
def test_a_call_on_the_model_or_a_part_of_it_is_seen(light: Light, part: str) -> None:
    light.model.get_submodule(part).eval()
    assert light.surroundings.take().training == light.flags()
    light.model.train()
    assert light.surroundings.take().training == light.flags() == light.first.training


def test_calls_that_are_not_noted_as_the_users_are_seen_as_well(light: Light) -> None:
    with light.log.ignoring():
        light.model.eval()
    assert not any(light.surroundings.take().training)


def test_an_evaluation_and_the_forward_after_it_read_the_modes(light: Light) -> None:
    before = light.surroundings.take().training
    light.model.eval()
    assert not any(light.surroundings.take(fresh=True).training)
    # As a loop does that gives each module its own mode back.
    light.assign(training=True)
    assert light.surroundings.take().training == before


def test_modes_that_an_evaluation_sets_itself_are_seen(light: Light) -> None:
    light.surroundings.take()
    light.assign(training=False)
    assert not any(light.surroundings.take(fresh=True).training)
    light.assign(training=True)
    assert all(light.surroundings.take().training)


def test_after_a_change_without_a_call_every_step_reads(light: Light) -> None:
    light.assign(training=False)
    assert not any(light.full_step())
    for training in (True, False):
        light.assign(training=training)
        assert light.surroundings.take().training == light.flags() == (training,) * 4


def test_a_change_with_a_call_is_no_reason_to_read_every_time(light: Light) -> None:
    light.model.eval()
    light.full_step()
    first = light.surroundings.take().training
    assert light.surroundings.take().training is first


def test_modes_that_were_taken_over_are_read_when_a_replay_asks(light: Light) -> None:
    ambient = light.surroundings.take()
    light.assign(training=False)
    assert light.surroundings.revised(ambient).training == light.flags()
    assert light.surroundings.revised(ambient).random is ambient.random
    # Who has called since: what was taken over may well have been right.
    light.model.eval()
    assert light.surroundings.revised(ambient) is ambient


def test_modes_that_were_read_stay_as_they_were(light: Light) -> None:
    light.pace.full = True
    ambient = light.surroundings.take()
    light.assign(training=False)
    assert light.surroundings.revised(ambient) is ambient


def test_autocast_is_seen_in_a_light_step(light: Light) -> None:
    off = light.surroundings.take().autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert light.surroundings.take().autocast == {"cpu": (True, torch.bfloat16)}
    with torch.autocast("cpu", dtype=torch.float16):
        assert light.surroundings.take().autocast == {"cpu": (True, torch.float16)}
    assert light.surroundings.take().autocast == off == {"cpu": (False, torch.get_autocast_dtype("cpu"))}


def test_where_the_first_forward_was_under_autocast_it_is_not_on_later() -> None:
    model = nn.Linear(2, 2)
    pace = Pace(light=True)
    surroundings = Surroundings(model, ModeLog(model), pace)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        surroundings.take()
    pace.full = False
    assert surroundings.take().autocast == {"cpu": (False, torch.get_autocast_dtype("cpu"))}


def test_an_older_torch_is_asked_for_each_type(light: Light, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_guard.hooks.capture.execution_context._ANY_AUTOCAST", lambda: True)
    assert light.surroundings.take().autocast == light.first.autocast


def test_grad_mode_inference_mode_and_saved_hooks_are_seen(light: Light) -> None:
    assert light.surroundings.take()[3:] == (True, False, None)
    with torch.no_grad():
        assert not light.surroundings.take().grad
    with torch.inference_mode():
        assert light.surroundings.take().inference

    def same(value: Tensor) -> Tensor:
        return value

    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert light.surroundings.take().saved == (same, same)


def test_without_a_log_everything_is_read() -> None:
    model = nn.Linear(2, 2)
    surroundings = Surroundings(model)
    assert surroundings.take().training == (True,)
    model.training = False
    assert surroundings.take().training == (False,)
