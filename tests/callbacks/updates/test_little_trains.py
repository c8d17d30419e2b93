"""A model of which biases and scales alone are trained: worth knowing, and said once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.callbacks.updates.ownership import only_scales
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def run(trains: Callable[[str], bool], guard: ParamDeltaProbe | None = None) -> list[Finding]:
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[guard or ParamDeltaProbe()], sinks=[]) as guardian:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return list(guardian.findings)


@pytest.mark.parametrize("trains", [lambda name: name.startswith("1"), lambda name: name.endswith("bias")])
def test_it_is_noted_once_with_what_is_frozen(trains: Callable[[str], bool]) -> None:
    guard = ParamDeltaProbe()
    (found,) = run(trains, guard)
    assert (found.code, found.severity, found.step, found.parameter) == ("GG310", Severity.INFO, 0, "2.weight")
    assert "All 2 weight matrices of the model are frozen" in found.seen
    assert "froze more than was meant" in found.causes[0]
    again = ParamDeltaProbe()
    again.load_state_dict(guard.state_dict())
    assert run(trains, again) == []


def test_one_matrix_is_said_in_the_singular() -> None:
    model = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2, requires_grad=True)}
    (found,) = only_scales(model, 0)
    assert found.seen.endswith("Its only weight matrix is frozen (`weight`).")


@pytest.mark.parametrize(
    "trains", [lambda name: True, lambda name: name.startswith("2"), lambda name: name == "0.weight"]
)
def test_where_a_matrix_trains_nothing_is_said(trains: Callable[[str], bool]) -> None:
    assert run(trains) == []
