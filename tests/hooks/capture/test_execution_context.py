"""The context of a forward: taken as it is, and put back for another forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.capture.execution_context import ContextReader, put_into

from ..dropping_net import Net


def test_a_forward_in_its_context_is_the_forward_that_it_was() -> None:
    model, x = Net(), torch.ones(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = ContextReader(model).take()
        first = model(x)
    model.eval()
    torch.rand(7)
    state = torch.get_rng_state()
    with torch.no_grad(), put_into(model, context):
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
        context = ContextReader(model).take()
        first: Any = model(x)
        with torch.no_grad():
            model.layer.weight.fill_(2)
        with put_into(model, context):
            again = model(x)
        assert torch.is_autocast_cache_enabled()
        assert torch.equal(model(x).isfinite(), first.isfinite())
    assert not torch.equal(first, again)


def test_where_a_generator_cannot_be_read_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is recorded."""

    def refuse() -> Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    model = Net()
    reader = ContextReader(model)
    monkeypatch.setattr(reader, "_random", [("cpu", torch.default_generator.get_state), ("cuda:0", refuse)])
    context = reader.take()
    assert context.random == {}
    assert context.training == (True, True, True)
    with put_into(model, context):
        model(torch.ones(2, 3))


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))


def flags(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


def test_each_forward_has_the_random_state_of_its_own(model: nn.Module) -> None:
    reader = ContextReader(model)
    first = reader.take()
    torch.rand(1)
    state = torch.get_rng_state()
    second = reader.take()
    assert not torch.equal(first.random["cpu"], second.random["cpu"])
    assert torch.equal(second.random["cpu"], state)


@pytest.mark.parametrize("part", ["", "1", "1.0"])
def test_modes_are_read_each_time_and_stay_as_they_were(model: nn.Module, part: str) -> None:
    reader = ContextReader(model)
    before = reader.take()
    model.get_submodule(part).eval()
    assert reader.take().training == flags(model) != before.training == (True,) * 4
    model.train()
    # Set without a call of `.train()` or `.eval()`.
    model.get_submodule(part).training = False
    assert reader.take().training == flags(model) != (True,) * 4


def test_autocast_is_seen_wherever_the_first_forward_was(model: nn.Module) -> None:
    reader = ContextReader(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reader.take().autocast == {"cpu": (True, torch.bfloat16)}
    with torch.autocast("cpu", dtype=torch.float16):
        assert reader.take().autocast == {"cpu": (True, torch.float16)}
    assert reader.take().autocast == {"cpu": (False, torch.get_autocast_dtype("cpu"))}


def test_grad_mode_inference_mode_and_saved_hooks_are_seen(model: nn.Module) -> None:
    reader = ContextReader(model)
    assert reader.take()[3:] == (True, False, None)
    with torch.no_grad():
        assert not reader.take().grad
    with torch.inference_mode():
        assert reader.take().inference

    def same(value: Tensor) -> Tensor:
        return value

    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert reader.take().saved == (same, same)
