"""Copies of inputs, and a model that is run once more without a trace."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.inspection import Inspection
from gpt_guard.hooks.isolation.rerun import Rerun, copied, marks, not_repeatable, odd
from gpt_guard.hooks.module_hooks import ModuleHooks
from gpt_guard.hooks.tensors import walk

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs as a dataclass."""

    ids: Tensor
    name: str = "x"


INPUTS: Any = (
    (Batch(torch.arange(3)), Pair(torch.ones(2), 1), [torch.zeros(1), None], torch.Size([2])),
    {"more": OrderedDict(mask=torch.ones(1, dtype=torch.bool)), "flag": True, "kind": torch.float32},
)


def test_a_copy_has_the_same_structure_and_other_tensors() -> None:
    assert odd(INPUTS) is None
    again = copied(INPUTS)
    one, other = dict(walk(INPUTS)), dict(walk(again))
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) and one[key] is not other[key] for key in one)
    assert type(again[0][0]) is Batch
    assert type(again[0][1]) is Pair
    assert type(again[1]["more"]) is OrderedDict


def test_a_tensor_can_be_exchanged_by_its_position() -> None:
    position = next(position for position, tensor in walk(INPUTS) if tensor.dtype is torch.bool)
    given = torch.zeros(1, dtype=torch.bool)
    assert copied(INPUTS, {position: given})[1]["more"]["mask"] is given
    assert bool(INPUTS[1]["more"]["mask"])


@pytest.mark.parametrize("thing", [object(), iter([]), nn.Identity(), torch.Generator()])
def test_what_cannot_be_copied_is_named(thing: Any) -> None:
    assert odd(((torch.ones(1), [thing]), {})) == type(thing).__name__


class Cache:
    """An object of a user's own."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.count = 0


class Restless(nn.Module):
    """Changes everything that it can reach in its forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.cache, self.steps = nn.Linear(2, 2), Cache(), [0]
        self.generator, self.dice = torch.Generator().manual_seed(1), random.Random(2)
        self.register_buffer("mean", torch.zeros(2))
        self.training_seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.kept.append(x)
        self.cache.count += 1
        self.steps.append(len(self.steps))
        self.training_seen.append(self.training)
        self.mean += x.mean(0)
        self.net.weight.data = self.net.weight.data * 0.5
        self.net.bias.data.mul_(0.5)
        noise = torch.rand(2, generator=self.generator) + self.dice.random() + torch.rand(2)
        x.mul_(2)
        answer: Tensor = self.net(x + noise)
        return answer


def test_a_restless_model_is_as_it_was() -> None:
    model, x = Restless(), torch.ones(3, 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    storage, generator = model.net.weight.data_ptr(), model.generator.get_state()
    python, ambient = model.dice.getstate(), torch.get_rng_state()
    rerun = Rerun(model, ((x,), {}), {})
    inspection = Inspection(ModuleHooks(model, immediate=True), steps=1)
    with rerun.open(inspection, "a look"):
        rerun()
        rerun(seed=1)
        assert model.training_seen == [False, False]
        assert not torch.is_grad_enabled()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.net.weight.data_ptr() == storage
    assert (model.cache.kept, model.cache.count, model.steps, model.training_seen) == ([], 0, [0], [])
    assert torch.equal(model.generator.get_state(), generator)
    assert model.dice.getstate() == python
    assert torch.equal(torch.get_rng_state(), ambient)
    assert torch.equal(x, torch.ones(3, 2))
    assert model.training
    assert inspection.probes == {"a look": 1}


def test_a_forward_that_writes_to_its_weights_leaves_marks() -> None:
    model = Restless()
    before = marks(model)
    with torch.no_grad():
        model(torch.ones(3, 2))
    assert marks(model) != before
    quiet = nn.Linear(2, 2)
    before = marks(quiet)
    quiet(torch.ones(3, 2)).sum().backward()
    assert marks(quiet) == before


def test_why_a_model_is_not_repeated() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not_repeatable(model) is None
    assert not_repeatable(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))) is None
    handle = model[1].register_forward_hook(lambda *given: None)
    assert "hooks of your own" in str(not_repeatable(model))
    handle.remove()
    compiled: Any = torch.compile(model, backend="eager")
    assert "compiled" in str(not_repeatable(compiled))


def test_autocast_is_the_loops_own() -> None:
    model = nn.Linear(2, 2)
    rerun = Rerun(model, ((torch.ones(1, 2),), {}), {"cpu": (True, torch.bfloat16)})
    with rerun.open(Inspection(ModuleHooks(model, immediate=True), steps=1), "a look"):
        assert rerun().dtype is torch.bfloat16
    assert rerun.eps == torch.finfo(torch.bfloat16).eps
