"""Who wrote to a parameter: a step, or something between two of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpt_guard.hooks.versions import ParameterVersions

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
