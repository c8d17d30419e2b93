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


def steps(layer: nn.Linear, *between: Between) -> tuple[ParameterVersions, list[bool]]:
    """Some steps, each after what comes between it and the one before; and whether a write was seen."""
    versions = ParameterVersions(dict(layer.named_parameters()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen = []
    for number, act in enumerate(between):
        layer(torch.ones(2, 3)).sum().backward()
        act(layer)
        seen.append(versions.step_begins((0, number)))
        optimizer.step()
        versions.step_ended()
    return versions, seen


def test_a_write_between_two_steps_is_told_from_one_inside() -> None:
    layer = nn.Linear(3, 2)
    versions, seen = steps(layer, nothing, in_place, nothing)
    assert seen == [False, True, False]
    assert [versions.written_between("weight", (0, number)) for number in range(3)] == seen
    assert not any(versions.written_between("bias", (0, number)) for number in range(3))


@pytest.mark.parametrize("step", [(0, 7), (1, 1)])
def test_of_a_step_that_is_not_known_nothing_is_said(step: tuple[int, int]) -> None:
    versions, _ = steps(nn.Linear(3, 2), nothing, in_place)
    assert not versions.written_between("weight", step)
    assert not versions.written_between("no such parameter", (0, 1))


def test_a_write_after_the_newest_step_is_seen_until_the_next() -> None:
    layer = nn.Linear(3, 2)
    versions, _ = steps(layer, nothing, nothing)
    assert not versions.written_since("weight")
    in_place(layer)
    assert versions.written_since("weight")
    assert not versions.written_since("bias")


def test_a_write_through_data_is_not_seen() -> None:
    _, seen = steps(nn.Linear(3, 2), nothing, past_the_counter)
    assert seen == [False, False]


def test_inference_tensors_do_not_count() -> None:
    with torch.inference_mode():
        weight = torch.ones(2)
    versions = ParameterVersions({"weight": weight})
    assert not versions.step_begins((0, 0))
    versions.step_ended()
    assert versions.after == [-1]
