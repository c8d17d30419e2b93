"""The assertions pass on a sound model, raise CheckFailed with the finding on a broken one, and leave no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.checks.asserts.training import (
    assert_gradients_reach_all,
    assert_overfits,
    assert_step_changes_parameters,
)
from gpt_guard.errors import GuardUsageError
from mini_gpt import MiniGPT, MiniGPTConfig

V, T = 17, 12
CONFIG = MiniGPTConfig(V, block_size=T, embedding_dim=32, num_heads=2, num_layers=1, dropout=0.1)


@pytest.fixture
def model() -> MiniGPT:
    return MiniGPT(CONFIG)


@pytest.fixture
def xy() -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (4, T + 1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def test_a_sound_model_passes_all_and_is_as_before(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    model.eval()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert_gradients_reach_all(model, *xy)
    assert_step_changes_parameters(model, *xy)
    assert_step_changes_parameters(model, *xy, optimizer)
    assert_overfits(model, *xy)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.dropout.p == 0.1


def test_also_where_gradients_are_switched_off(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        assert_gradients_reach_all(model, *xy)
        assert_step_changes_parameters(model, *xy)


def test_a_parameter_without_gradient(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    model.extra = nn.Linear(3, 3)
    with pytest.raises(CheckFailed, match=r"extra\.weight") as caught:
        assert_gradients_reach_all(model, *xy)
    (found,) = caught.value.findings
    assert found.code == "GG202"
    assert str(caught.value).startswith("GG202 Trainable parameters without a gradient")
    with pytest.raises(AssertionError, match=r"extra\.weight"):
        assert_step_changes_parameters(model, *xy)


def test_a_parameter_that_is_not_held(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(CheckFailed) as caught:
        assert_step_changes_parameters(model, *xy, AdamW(model.blocks.parameters(), lr=1e-3))
    assert [found.code for found in caught.value.findings] == ["GG302"]


def test_a_model_that_is_trained_further_is_as_before_a_failure(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.norm.register_forward_hook(lambda _module, _args, output: output * 0.0)
    with pytest.raises(CheckFailed) as caught:
        assert_overfits(model, *xy, steps=120)
    assert caught.value.findings[0].code == "GG670"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_function_that_makes_a_model(xy: tuple[Tensor, Tensor]) -> None:
    assert_overfits(lambda: MiniGPT(replace(CONFIG, dropout=0.0)), *xy, steps=300)
    with pytest.raises(CheckFailed) as caught:
        assert_overfits(lambda: MiniGPT(CONFIG).requires_grad_(False), *xy, steps=1)
    assert caught.value.findings[0].code == "GG310"


def test_steps_must_be_steps(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(GuardUsageError, match="steps is 0"):
        assert_overfits(model, *xy, steps=0)
