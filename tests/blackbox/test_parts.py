"""Bundles of loops that do not call the model itself, and of a forward that calls backward() itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from gpt_guard import Guardian
from gpt_guard.blackbox.replay import replay
from gpt_guard.cli.app import app
from gpt_guard.errors import GuardError, GuardUsageError

from .conftest import HERE
from .failing_models import OnlyMethods


def failed_method(tmp_path: Path) -> str:
    model = OnlyMethods()
    guardian = Guardian(model, run_dir=tmp_path, sinks=[])
    loss_of = guardian.watch_loss(model.loss)
    with pytest.raises(GuardError) as caught, guardian:
        loss_of(torch.ones(3, 4)).backward()
    operation = caught.value.finding.operation
    assert operation is not None, caught.value.finding.replay
    assert operation.name == "log"
    return str(caught.value.finding.bundle)


def test_a_method_that_gives_the_loss_is_run_on_the_model_that_is_built_anew(tmp_path: Path) -> None:
    bundle = failed_method(tmp_path)
    assert replay(bundle, OnlyMethods(), loss_fn=OnlyMethods.loss).same
    assert replay(bundle, OnlyMethods(eps=1.0), loss_fn=OnlyMethods.loss).reproduced is False


def test_the_command_takes_the_method_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    called = ["replay", failed_method(tmp_path), "--model", "failing_models:OnlyMethods"]
    run = CliRunner().invoke(app, [*called, "--loss", "failing_models:OnlyMethods.loss"])
    assert run.exit_code == 1
    assert "The same fault at the same place." in run.stdout
    run = CliRunner().invoke(app, [*called, "--loss", "failing_models:OnlyMethods.los"])
    assert run.exit_code == 2
    assert "failing_models has no OnlyMethods.los" in run.stderr


def test_without_it_there_is_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match=r"parts or methods of the model.*OnlyMethods\.loss: give it as loss_fn"):
        replay(failed_method(tmp_path), OnlyMethods())


class CallsBackward(nn.Module):
    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.body, self.eps = nn.Linear(4, 4), eps

    def forward(self, x: Tensor) -> float:
        loss = (self.body(x).relu() * 0 + self.eps).sqrt().mean()
        loss.backward()
        return float(loss)


def test_a_backward_inside_of_the_forward_is_run_again_too(tmp_path: Path) -> None:
    model = CallsBackward()
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir=tmp_path, sinks=[]):
        model(torch.ones(3, 4))
    finding = caught.value.finding
    assert finding.code == "GG104"
    assert replay(str(finding.bundle), CallsBackward()).same
    assert replay(str(finding.bundle), CallsBackward(eps=1.0)).reproduced is False
