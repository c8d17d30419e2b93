"""FreezeInTrain: parts that only the model's own train() freezes."""

from __future__ import annotations

from typing import Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.callbacks.modes.freezing import FreezeInTrain
from gpt_guard.records import Finding


class Backbone(nn.Module):
    """Freezes its stem, and counts how often, when it is told to train."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.body = nn.Linear(8, 8)
        self.calls = 0

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.calls += 1
        self.stem.requires_grad_(False)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.stem(x).relu())
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


def run(model: Model, guard: FreezeInTrain, *, start_in_train: bool) -> tuple[Finding, ...]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if start_in_train:
        model.train()
    with Guardian(model, optimizer, guards=[guard], sinks=[]) as guardian:
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(6, 4)), torch.ones(6, 2)).backward()
            optimizer.step()
    return guardian.findings


def test_a_part_that_train_would_freeze_is_told_in_the_first_step() -> None:
    (found,) = run(Model(), FreezeInTrain(), start_in_train=False)
    assert (found.code, found.step, found.module, found.module_class) == ("GG511", 0, "backbone", "Backbone")
    assert found.evidence["parameters"] == ["backbone.stem.bias", "backbone.stem.weight"]


def test_a_loop_that_calls_train_is_silent() -> None:
    assert run(Model(), FreezeInTrain(), start_in_train=True) == ()


def test_asking_leaves_no_trace() -> None:
    def weights(guarded: bool) -> tuple[list[Tensor], int, list[bool]]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        guards = [FreezeInTrain()] if guarded else []
        with Guardian(model, optimizer, guards=guards, sinks=[]):
            for _ in range(4):
                optimizer.zero_grad()
                F.mse_loss(model(torch.randn(6, 4)), torch.ones(6, 2)).backward()
                optimizer.step()
        return list(model.parameters()), model.backbone.calls, [each.training for each in model.modules()]

    (asked, calls, modes), (plain, plain_calls, plain_modes) = weights(True), weights(False)
    assert all(torch.equal(mine, other) for mine, other in zip(asked, plain, strict=True))
    assert all(each.requires_grad for each in asked)
    assert (calls, modes) == (plain_calls, plain_modes)


def test_it_is_said_once_over_a_resume() -> None:
    guard = FreezeInTrain()
    run(Model(), guard, start_in_train=False)
    again = FreezeInTrain()
    again.load_state_dict(guard.state_dict())
    assert run(Model(), again, start_in_train=False) == ()


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 1, 8)])
def test_models_without_a_train_of_their_own_are_not_asked(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[FreezeInTrain()], sinks=[]) as guardian:
        width = 2 if isinstance(model, nn.Linear) else 4
        model(torch.ones(1, 1, width)).sum().backward()
        optimizer.step()
    assert guardian.report().probes == {}
