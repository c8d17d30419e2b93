"""Parameters and buffers: which one went bad, whether before or through a forward or a step, and who wrote to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.weights import ParameterVersions, StateWatch, bad_state


class Model(nn.Module):
    mean: Tensor
    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("ids", torch.zeros(3, dtype=torch.long))


def watch(model: nn.Module, *, parameters: bool = True, buffers: bool = True) -> StateWatch:
    state = StateWatch(model, parameters=parameters, buffers=buffers)
    state.settle()
    return state


def turned(state: StateWatch) -> list[str]:
    norms = state.norms()
    return [] if norms is None else list(state.turned_bad(norms.tolist()))


@torch.no_grad()
def spoil(tensor: Tensor, value: float = math.nan) -> None:
    tensor.view(-1)[0] = value


def test_what_went_bad_is_named_once() -> None:
    model = Model()
    state = watch(model)
    assert turned(state) == []
    spoil(model.layer.weight)
    spoil(model.mean, math.inf)
    assert turned(state) == ["layer.weight", "mean"]
    assert turned(state) == []


def test_finite_values_whose_norm_overflows_are_not() -> None:
    model = Model()
    state = watch(model)
    with torch.no_grad():
        model.layer.weight.fill_(3e38)
    assert turned(state) == []


def test_a_buffer_that_was_replaced_is_still_watched() -> None:
    model = Model()
    state = watch(model)
    model.mean = torch.tensor([1.0, math.nan, 0.0])
    assert turned(state) == ["mean"]


def test_what_is_bad_at_the_start_is_left_out() -> None:
    model = Model()
    spoil(model.mean, math.inf)
    state = watch(model)
    assert state.at_start == {"mean"}
    assert (state.watches("mean"), state.watches("layer.weight")) == (False, True)
    assert turned(state) == []


def test_a_mask_that_appears_is_quiet() -> None:
    model = Model()
    state = watch(model)
    spoil(model.mean, -math.inf)
    assert turned(state) == []


def test_negative_infinity_that_is_no_mask_is_named() -> None:
    model = Model()
    state = watch(model)
    spoil(model.layer.weight, -math.inf)
    spoil(model.norm.running_mean, -math.inf)  # type: ignore[arg-type]  # a BatchNorm that tracks
    with torch.no_grad():
        model.mean.copy_(torch.tensor([1.0, -math.inf, 2.0]))
    assert turned(state) == ["layer.weight", "mean", "norm.running_mean"]
    assert state.told == {"layer.weight", "norm.running_mean", "mean"}


def test_negative_infinity_counts_in_what_is_trained_unless_it_was_there_at_the_start() -> None:
    model = Model()
    spoil(model.layer.bias, -math.inf)
    state = watch(model)
    assert state.known.masks == {id(model.layer.bias)}
    assert bad_state(model, "", {}, state.known) is None
    spoil(model.layer.weight, -math.inf)
    found = bad_state(model, "", {}, state.known)
    assert found is not None
    assert found.name == "layer.weight"
    model.layer.weight.requires_grad_(False)
    assert bad_state(model, "", {}, state.known) is None


def test_what_becomes_finite_is_watched_again() -> None:
    model = Model()
    spoil(model.layer.bias)
    state = watch(model)
    assert list(state.settled_late()) == ["layer.bias"]
    spoil(model.layer.bias, 1.0)
    assert state.settled_late() == {}
    assert state.watches("layer.bias")
    assert turned(state) == []
    spoil(model.layer.bias)
    assert turned(state) == ["layer.bias"]
    state.recover()
    assert not state.watches("layer.bias")
    spoil(model.layer.bias, 1.0)
    state.recover()
    assert state.watches("layer.bias")
    assert state.told == set()


def test_each_kind_can_be_left_out() -> None:
    model = Model()
    spoil(model.layer.weight)
    spoil(model.mean)
    assert turned(StateWatch(model, parameters=False, buffers=True)) == ["mean"]
    assert turned(StateWatch(model, parameters=True, buffers=False)) == ["layer.weight"]
    assert StateWatch(model, parameters=False, buffers=False).norms() is None


def test_mixed_dtypes_are_measured_together() -> None:
    model = nn.ModuleList([nn.Linear(2, 2).half(), nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()])
    state = watch(model)
    with torch.no_grad():
        model[1].weight.fill_(1e300)  # type: ignore[operator]  # a Linear
    assert turned(state) == []
    spoil(model[2].bias)  # type: ignore[arg-type]  # a Linear
    assert turned(state) == ["2.bias"]


def test_the_first_bad_parameter_or_untouched_buffer_is_found_by_its_full_name() -> None:
    model = nn.Sequential(Model())
    state = watch(model)
    spoil(model[0].mean)  # type: ignore[arg-type]  # a buffer
    untouched = state.buffer_versions()
    found = bad_state(model[0], "0", untouched)
    assert found is not None
    assert (found.name, found.is_parameter) == ("0.mean", False)
    spoil(model[0].layer.weight)  # type: ignore[arg-type,union-attr]  # a Linear
    found = bad_state(model, "", untouched)
    assert found is not None
    assert (found.name, found.is_parameter) == ("0.layer.weight", True)


def test_a_buffer_that_this_forward_has_written_to_is_no_cause() -> None:
    model = Model()
    untouched = watch(model).buffer_versions()
    spoil(model.mean)
    assert bad_state(model, "", untouched) is None
    model.mean = torch.tensor([math.nan])
    assert bad_state(model, "", untouched) is None


def test_statistics_count_only_where_they_are_read() -> None:
    model = Model()
    spoil(model.norm.running_mean)  # type: ignore[arg-type]  # a BatchNorm that tracks
    untouched = watch(model).buffer_versions()
    assert bad_state(model, "", untouched) is None
    found = bad_state(model.eval(), "", untouched)
    assert found is not None
    assert found.name == "norm.running_mean"


Between = Callable[[nn.Linear], object]


def nothing(_layer: nn.Linear) -> None:
    return None


@torch.no_grad()
def in_place(layer: nn.Linear) -> None:
    layer.weight.mul_(0.5)


def past_the_counter(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.5)


def steps(layer: nn.Linear, *between: Between) -> ParameterVersions:
    """Some steps, each after what comes between it and the one before."""
    versions = ParameterVersions(dict(layer.named_parameters()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for number, act in enumerate(between):
        layer(torch.ones(2, 3)).sum().backward()
        act(layer)
        versions.step_begins((0, number))
        optimizer.step()
        versions.step_ended()
    return versions


def test_a_write_between_two_steps_is_told_from_one_inside() -> None:
    versions = steps(nn.Linear(3, 2), nothing, in_place, nothing)
    assert [versions.written_between("weight", (0, number)) for number in range(3)] == [False, True, False]
    assert not any(versions.written_between("bias", (0, number)) for number in range(3))


@pytest.mark.parametrize("step", [(0, 7), (1, 1)])
def test_of_a_step_that_is_not_known_nothing_is_said(step: tuple[int, int]) -> None:
    versions = steps(nn.Linear(3, 2), nothing, in_place)
    assert not versions.written_between("weight", step)
    assert not versions.written_between("no such parameter", (0, 1))


def test_a_write_through_data_is_not_seen() -> None:
    versions = steps(nn.Linear(3, 2), nothing, past_the_counter)
    assert not versions.written_between("weight", (0, 1))


def test_inference_tensors_do_not_count() -> None:
    with torch.inference_mode():
        weight = torch.ones(2)
    versions = ParameterVersions({"weight": weight})
    versions.step_begins((0, 0))
    versions.step_ended()
    assert not versions.written_between("weight", (0, 0))
