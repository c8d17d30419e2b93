"""The report of a run on disk: on every way out, whole, comparable, and no trouble for the training."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt_guard.guardian import Guardian
from gpt_guard.records import Report
from gpt_guard.report.compare import compare_reports
from gpt_guard.report.file import RUN_REPORT_FILE, read_report
from gpt_guard.sinks.report import ReportSink


def train(run_dir: Path, steps: int = 3, stop_at: int | None = None, lr: float = 0.1) -> Guardian:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Guardian(model, optimizer, run_dir=run_dir, sinks=[]) as guardian:
        for step in range(steps):
            if step == stop_at:
                raise KeyboardInterrupt
            optimizer.zero_grad()
            model(torch.ones(4, 2)).pow(2).mean().backward()
            optimizer.step()
    return guardian


def test_a_report_can_be_saved_and_read_again(tmp_path: Path, report: Report) -> None:
    odd = report.model_copy(update={"last_loss": math.nan, "grad_norm_max": math.inf})
    assert odd.save(tmp_path / "new" / "r.json") == tmp_path / "new" / "r.json"
    again = read_report(tmp_path / "new" / "r.json")
    assert again.model_dump_json() == odd.model_dump_json()
    assert math.isnan(again.last_loss or 0.0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.json"]


def test_a_run_leaves_its_report_beside_its_log(tmp_path: Path) -> None:
    guardian = train(tmp_path)
    report = read_report(tmp_path / RUN_REPORT_FILE)
    assert (report.model, report.parameters, report.steps) == ("Linear", 3, 3)
    assert guardian.latest is not None
    assert report.last_loss == guardian.latest.loss
    assert report.guards == tuple(guard.name for guard in guardian.guards)


def test_also_when_it_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, stop_at=2)
    assert read_report(tmp_path / RUN_REPORT_FILE).steps == 2


def test_two_runs_can_be_compared(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        train(tmp_path / name, lr=lr)
    one, same, other = (read_report(tmp_path / name / RUN_REPORT_FILE) for name in "abc")
    assert compare_reports(one, same) == ()
    assert {"lr_max", "last_loss"} <= {change.what for change in compare_reports(one, other)}


def test_an_evaluation_leaves_the_report_of_the_training(tmp_path: Path) -> None:
    train(tmp_path)
    model = nn.Linear(2, 1).eval()
    with Guardian(model, run_dir=tmp_path, sinks=[]):
        pass
    assert read_report(tmp_path / RUN_REPORT_FILE).steps == 3
    with Guardian(model, run_dir=tmp_path / "only", sinks=[]):
        pass
    assert read_report(tmp_path / "only" / RUN_REPORT_FILE).steps == 0


def test_a_folder_that_cannot_be_written_costs_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / RUN_REPORT_FILE).mkdir()
    with caplog.at_level(logging.WARNING, "gpt_guard"):
        guardian = train(tmp_path)
    assert guardian.step == 3
    assert "GG905" in caplog.text
    assert "ReportSink" in caplog.text


@pytest.mark.parametrize("inside", ["", "deeper/runs"])
def test_one_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: str
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    with caplog.at_level(logging.INFO, "gpt_guard"):
        guardian = train(file / inside if inside else file)
    assert guardian.step == 3
    assert [finding.code for finding in guardian.findings] == ["GG905"]
    assert len(caplog.records) == 1
    assert any("fingerprint.json cannot be read" in line for line in guardian.report().not_watched)


def test_trouble_is_among_the_findings_at_once(tmp_path: Path) -> None:
    (tmp_path / RUN_REPORT_FILE).mkdir()
    guardian = train(tmp_path)
    assert [finding.code for finding in guardian.findings] == ["GG905"]


def test_trouble_is_over_when_it_is_opened_again(tmp_path: Path) -> None:
    sink = ReportSink(tmp_path)
    (tmp_path / RUN_REPORT_FILE).mkdir()
    sink.close(Report(steps=1))
    assert sink.trouble is not None
    (tmp_path / RUN_REPORT_FILE).rmdir()
    sink.open({})
    sink.close(Report(steps=1))
    assert sink.trouble is None
    assert read_report(tmp_path / RUN_REPORT_FILE).steps == 1
