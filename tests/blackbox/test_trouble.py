"""A bundle that cannot be written, or not any more: said once, and the finding goes its way."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_guard import Guardian
from gpt_guard.blackbox import service
from gpt_guard.errors import GuardUsageError, NonFiniteError

from .conftest import built, bundles, guardian_of, train
from .failing_models import TwoFaults


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

    monkeypatch.setattr(service, "source_of", broken)
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
