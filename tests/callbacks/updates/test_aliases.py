from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding


def watched(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[Finding]:
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[])
    with guardian:
        for _ in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return list(guardian.findings)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))


# GG320: twice in the optimizer.


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_that_stands_twice_in_a_group(tied: bool) -> None:
    model = net()
    if tied:
        model[2].weight = model[0].weight
    optimizer = torch.optim.SGD([*model.parameters(), model.get_parameter("0.weight")], lr=0.01)
    (found,) = watched(model, optimizer)
    assert (found.code, found.step, found.module, found.parameter) == ("GG320", 0, "0", "0.weight")
    assert ("Tied weights" in found.causes[0]) == tied


def test_groups_that_overlap_after_an_append() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[3].weight]})
    (found,) = watched(model, optimizer)
    assert (found.code, found.parameter) == ("GG320", "3.weight")
    assert "Two filters" in found.causes[0]


def test_tied_weights_given_once_are_quiet() -> None:
    model = net()
    model[2].weight = model[0].weight
    assert watched(model, torch.optim.SGD(model.parameters(), lr=0.01)) == []


# GG306: frozen, on the storage of what is trained.


def teacher(copy: Any) -> nn.Module:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.teacher.requires_grad_(False)
            self.teacher.weight.data = copy(self.student.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.teacher(self.student(x)).tanh())
            return y

    return Pair()


def test_a_frozen_parameter_on_the_storage_of_a_trained_one() -> None:
    model = teacher(lambda values: values)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    (found,) = watched(model, optimizer)
    assert (found.code, found.module, found.parameter) == ("GG306", "teacher", "teacher.weight")
    assert "`student.weight`" in found.seen
    assert found.causes[0].startswith("It shares its storage")


def test_a_frozen_copy_is_quiet() -> None:
    model = teacher(torch.clone)
    assert watched(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)) == []


def test_views_of_one_storage_that_do_not_overlap_are_quiet() -> None:
    flat = torch.randn(2, 16)
    model = teacher(torch.clone)
    for name, values in zip(("student.weight", "teacher.weight"), flat, strict=True):
        model.get_parameter(name).data = values.view(4, 4)
    assert watched(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)) == []
