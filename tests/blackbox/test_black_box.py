"""The bundle that a failure leaves: where it lies, what it holds, and what becomes of one that cannot be written."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard import Guardian, read_report, read_run
from gpt_guard.blackbox import black_box
from gpt_guard.blackbox.bundle import read_bundle
from gpt_guard.blackbox.replay import replay
from gpt_guard.blackbox.stored import FileName
from gpt_guard.blackbox.write import as_json
from gpt_guard.errors import GuardError, GuardUsageError, NonFiniteError
from gpt_guard.records.render import render_finding, render_short

from .conftest import Fail, built, bundles, guardian_of, train
from .failing_models import LogOfZero, TwoFaults


def test_the_exception_names_the_bundle_and_it_holds_everything(fail: Fail) -> None:
    failed = fail("log")
    assert failed.path == failed.run_dir / "crash-step-000002"
    assert f"gpt-guard replay {failed.path}" in " ".join(render_finding(failed.finding, width=400).split())
    assert str(failed.path) in render_short(failed.finding)
    bundle = failed.bundle
    assert set(bundle.manifest.files) == set(FileName) - {FileName.LOSS, FileName.GRADIENTS}
    assert bundle.manifest.step == 2
    assert bundle.manifest.code == failed.finding.code
    assert as_json(bundle.finding) == as_json(failed.finding.model_copy(update={"bundle": None, "bundle_model": None}))
    assert bundle.source.qualname == "LogOfZero"
    assert bundle.source.file is not None
    assert bundle.source.file.endswith("failing_models.py")
    assert bundle.modes == {"": True, "body": True, "head": True}
    assert bundle.environment["device"] == "cpu"
    assert [seen.step for seen in read_run(failed.path).steps] == [0, 1]
    (reported,) = [each for each in read_report(failed.path / "report.json").findings if each.code.startswith("GG1")]
    assert reported.cause == failed.finding.cause


def test_the_run_log_and_the_report_name_it_too(fail: Fail) -> None:
    failed = fail("log")
    assert failed.finding.bundle in [each.bundle for each in read_run(failed.run_dir).findings]
    assert failed.finding.bundle in [each.bundle for each in read_report(failed.run_dir / "run_report.json").findings]


def test_gradients_that_reached_the_outputs_are_kept_for_a_backward_that_failed(fail: Fail) -> None:
    failed = fail("sqrt")
    assert failed.finding.code == "GG104"
    gradients = failed.bundle.recipe_tensors()[FileName.GRADIENTS]["outputs"]
    assert torch.equal(gradients[""], torch.ones(3))


def go_on(model: nn.Module, guardian: Guardian, optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    """For each value a forward with it, and a healthy step after it."""
    with guardian:
        for value in values:
            model(torch.full((2, 2), value))
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("policy", ["record", "warn"])
def test_a_run_that_goes_on_leaves_one_bundle_for_each_cause(tmp_path: Path, policy: str) -> None:
    model = TwoFaults()
    guardian, optimizer = guardian_of(model, tmp_path, policy={"error": policy})
    go_on(model, guardian, optimizer, [1.0, 100.0, 100.0, -1.0, -1.0, 100.0, 1.0])
    found = {each.module: each.bundle for each in guardian.findings if each.code.startswith("GG1")}
    assert guardian.step == 7
    assert bundles(tmp_path) == ["crash-step-000001", "crash-step-000003"]
    assert found == {"power": str(tmp_path / "crash-step-000001"), "root": str(tmp_path / "crash-step-000003")}


def test_a_halt_that_is_caught_and_comes_back_points_to_the_first_bundle(tmp_path: Path) -> None:
    model = built("log")
    guardian, _ = guardian_of(model, tmp_path)
    named = set()
    with guardian:
        for _ in range(3):
            with pytest.raises(NonFiniteError) as caught:
                model(-torch.ones(2, 4))
            named.add(caught.value.finding.bundle)
    assert bundles(tmp_path) == ["crash-step-000000"]
    assert named == {str(tmp_path / "crash-step-000000")}


def test_a_second_run_in_the_same_folder_takes_another_name(fail: Fail) -> None:
    assert fail("log").path.name == "crash-step-000002"
    assert fail("log").path.name == "crash-step-000002-2"


def test_each_process_of_a_distributed_run_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert black_box._free_name(tmp_path, 7).name == "crash-step-000007-rank-3"
    (tmp_path / "crash-step-000007-rank-3").mkdir()
    assert black_box._free_name(tmp_path, 7).name == "crash-step-000007-rank-3-2"


def test_a_step_that_itself_breaks_the_weights_leaves_them_and_says_that_nothing_can_be_run(tmp_path: Path) -> None:
    model = built("log")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)

    def step() -> None:
        (model(torch.ones(2, 4)) * 1e10).sum().backward()
        optimizer.step()

    with pytest.raises(GuardError) as caught, Guardian(model, optimizer, run_dir=tmp_path, sinks=[]):
        step()
    assert caught.value.finding.code == "GG106"
    bundle = read_bundle(str(caught.value.finding.bundle))
    assert not all(bool(value.isfinite().all()) for value in bundle.weights()["model_state_dict"].values())
    with pytest.raises(GuardUsageError, match="GG106"):
        replay(bundle, LogOfZero())


def test_an_evaluation_that_fails_leaves_a_bundle_that_runs_as_one(tmp_path: Path) -> None:
    model = built("dropout").eval()
    bad = built("log")
    guardian, _ = guardian_of(bad, tmp_path)
    with pytest.raises(GuardError) as caught, guardian, guardian.evaluating() as evaluated:
        evaluated(-torch.ones(2, 4))
    bundle = read_bundle(str(caught.value.finding.bundle))
    assert bundle.recipe.evaluation
    assert bundle.recipe.ambient is not None
    assert not bundle.recipe.ambient.grad
    assert not any(bundle.modes.values())
    assert replay(bundle, LogOfZero()).same
    assert not model.training


def test_without_a_run_dir_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = built("log")
    guardian, optimizer = guardian_of(model, None)
    with pytest.raises(NonFiniteError) as caught:
        train(model, guardian, optimizer, "log")
    assert caught.value.finding.bundle is None
    assert list(tmp_path.iterdir()) == []


def test_a_healthy_run_leaves_no_bundle(tmp_path: Path) -> None:
    model = built("log")
    guardian, optimizer = guardian_of(model, tmp_path)
    train(model, guardian, optimizer, "log", steps=2)
    assert bundles(tmp_path) == []


def test_without_a_capture_the_state_is_kept_and_it_is_said(fail: Fail, fresh: LogOfZero) -> None:
    failed = fail("log", replay=False)
    assert not failed.bundle.has(FileName.BATCH)
    assert "no forward had been captured" in str(failed.bundle.why_absent(FileName.BATCH))
    assert failed.bundle.weights()["model_state_dict"].keys() == fresh.state_dict().keys()
    with pytest.raises(GuardUsageError, match="nothing to run again"):
        replay(failed.path, fresh)


def test_a_mismatch_at_the_start_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "fingerprint.json").write_text(
        json.dumps({"schema_version": "gpt_guard.fingerprint/1", "parts": {"config": "0" * 64}, "config": {"a": 1}})
    )
    model = built("log")
    guardian, _ = guardian_of(model, tmp_path, config={"a": 2}, strict=True)
    with pytest.raises(GuardError) as caught, guardian:
        pass
    assert caught.value.finding.code == "GG702"
    assert bundles(tmp_path) == []


def test_what_the_run_draws_and_holds_is_the_same_with_and_without_a_bundle(tmp_path: Path) -> None:
    results = []
    for run_dir in (None, tmp_path):
        torch.manual_seed(5)
        model = built("log")
        guardian, optimizer = guardian_of(model, run_dir, policy={"error": "record"})
        train(model, guardian, optimizer, "log", steps=4)
        results.append((torch.get_rng_state(), [each.detach().clone() for each in model.parameters()]))
    assert bundles(tmp_path)
    (state, weights), (other_state, other_weights) = results
    assert torch.equal(state, other_state)
    assert all(
        torch.equal(one, other) or bool(one.isnan().any()) for one, other in zip(weights, other_weights, strict=True)
    )


def test_a_full_disk_warns_once_and_masks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    model = TwoFaults()
    guardian, _ = guardian_of(model, tmp_path)
    with caplog.at_level(logging.WARNING, logger="gpt_guard"), guardian:
        for value in (100.0, -1.0):
            with pytest.raises(NonFiniteError) as caught:
                model(torch.full((2, 2), value))
            assert caught.value.finding.bundle is None
            assert caught.value.finding.code == "GG101"
    said = [record.message for record in caplog.records if "GG905" in record.message]
    assert len(said) == 1
    assert "disk" in said[0]
    assert bundles(tmp_path) == []
    assert [each.code for each in guardian.findings].count("GG905") == 1
    assert any("BlackBox" in line for line in guardian.report().not_watched)


def test_any_other_error_of_its_own_is_kept_away_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Any) -> None:
        raise KeyError("something unforeseen")

    monkeypatch.setattr(black_box, "source_of", broken)
    model = built("log")
    guardian, optimizer = guardian_of(model, tmp_path)
    with pytest.raises(NonFiniteError) as caught:
        train(model, guardian, optimizer, "log")
    assert caught.value.finding.operation is not None
    assert caught.value.finding.bundle is None
    assert "GG905" in caplog.text
    assert bundles(tmp_path) == []


def test_there_is_a_most_number_of_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoFaults()
    guardian, _ = guardian_of(model, tmp_path, policy={"error": "record"})
    monkeypatch.setattr(guardian._dispatch.sinks[-1], "most", 1)
    with guardian:
        for value in (100.0, -1.0):
            model(torch.full((2, 2), value))
    assert len(bundles(tmp_path)) == 1


@pytest.mark.parametrize("limit", [-1, True, "1", float("nan")])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(GuardUsageError, match="bundle_limit_mb"):
        Guardian(built("log"), bundle_limit_mb=limit)
