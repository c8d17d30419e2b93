"""Bundles of loops that change their folder, and of batches that are plain data in part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from gpt_guard import Guardian
from gpt_guard.blackbox.bundle import read_bundle
from gpt_guard.blackbox.replay import replay
from gpt_guard.cli.app import app
from gpt_guard.errors import GuardError, GuardUsageError

from .conftest import HERE, Fail
from .failing_models import LogOfZero


def test_a_loop_that_changes_its_folder_has_its_bundle_beside_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    model = LogOfZero()
    model.body.register_forward_hook(lambda *_: os.chdir("elsewhere"))
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir="run", sinks=[], replay=False):
        model(torch.full((2, 4), float("nan")))
    bundle = str(caught.value.finding.bundle)
    assert bundle == str(tmp_path / "run" / "crash-step-000000")
    assert read_bundle(bundle).finding.code == caught.value.finding.code


def test_a_bundle_below_the_current_folder_is_named_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir="run", sinks=[]):
        model(torch.full((2, 2), float("nan")))
    assert caught.value.finding.bundle == os.path.join("run", "crash-step-000000")


class WithExtras(nn.Module):
    """Gets more than tensors, as a batch of a data set often is; `uses` tells whether the extras matter."""

    def __init__(self, uses: bool = False, eps: float = 0.0) -> None:
        super().__init__()
        self.body, self.uses, self.eps = nn.Linear(2, 2), uses, eps

    def forward(self, batch: dict[str, Any]) -> Tensor:
        if self.uses:
            assert batch["where"].name == "a.png"
        output: Tensor = self.body(torch.log(batch["x"] + self.eps))
        return output


def failed(tmp_path: Path, *, uses: bool) -> str:
    model = WithExtras(uses)
    batch = {"x": -torch.ones(2, 2), "where": Path("a.png")}
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir=tmp_path, sinks=[]):
        model(batch)
    return str(caught.value.finding.bundle)


def test_what_is_no_plain_data_is_left_out_where_the_fault_shows_without_it(tmp_path: Path) -> None:
    done = replay(failed(tmp_path, uses=False), WithExtras())
    assert done.reproduced
    assert done.same
    assert "None was given for args[0]['where'], which is no plain data" in done.notes


@pytest.mark.parametrize(("uses", "eps"), [(True, 0.0), (False, 2.0)])
def test_without_it_nobody_can_say_that_a_fault_is_gone(tmp_path: Path, uses: bool, eps: float) -> None:
    bundle = failed(tmp_path, uses=uses)
    with pytest.raises(GuardUsageError, match=r"args\[0\]\['where'\] is no plain data.*args=\.\.\."):
        replay(bundle, WithExtras(uses, eps))
    batch = {"x": -torch.ones(2, 2), "where": Path("a.png")}
    assert replay(bundle, WithExtras(uses, eps), args=[batch]).reproduced is (eps == 0.0)


def test_a_factory_that_leaves_the_program_does_not_leave_this_one(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    run = CliRunner().invoke(app, ["replay", str(fail("log").path), "--model", "failing_models:leaves"])
    assert run.exit_code == 2
    assert "building --model failing_models:leaves failed: SystemExit: 3" in run.stderr
