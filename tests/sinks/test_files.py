"""The run log: lr beside grad norm on each line, NaN kept, nothing lost to a kill, no trouble for the training."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard import catalogue
from gpt_guard.guardian import Guardian
from gpt_guard.records import RUN_SCHEMA, Action, Moment, Observation, Report
from gpt_guard.report.compare import compare_reports
from gpt_guard.report.file import RUN_REPORT_FILE, read_report
from gpt_guard.report.run_log import read_run
from gpt_guard.sinks.files import JsonlSink, ReportSink


def seen(step: int, **fields: Any) -> Observation:
    known = {"loss": 2.5, "lr": (3e-4,), "grad_norm": 0.5, **fields}
    return Observation.model_validate({"step": step, "moment": Moment.BEFORE_STEP, **known})


def write(run_dir: Path, *observations: Observation) -> JsonlSink:
    sink = JsonlSink(run_dir)
    sink.open({"model": "MiniGPT"})
    for observation in observations:
        sink.observe(observation)
    return sink


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_bytes().splitlines()]


def test_header_steps_findings_and_metrics(tmp_path: Path) -> None:
    sink = write(tmp_path / "deep" / "run", seen(0), seen(1))
    sink.find(catalogue.finding("GG102", "the loss is NaN", step=1), Action.HALT)
    sink.log(1, {"bleu": 0.25})
    sink.close(Report())
    header, *rest = lines(tmp_path / "deep" / "run")
    assert header == {"kind": "header", "schema": RUN_SCHEMA, "model": "MiniGPT"}
    assert [line["kind"] for line in rest] == ["step", "step", "finding", "metrics"]
    assert rest[2]["code"] == "GG102"
    assert rest[2]["action"] == "halt"
    assert rest[3] == {"kind": "metrics", "step": 1, "metrics": {"bleu": 0.25}}


def test_lr_stands_beside_grad_norm_on_every_line(tmp_path: Path) -> None:
    write(tmp_path, seen(0), seen(1, grad_norm=None), seen(2, lr=(1e-3, 1e-4))).close(None)
    for line in lines(tmp_path)[1:]:
        assert list(line)[:4] == ["kind", "step", "lr", "grad_norm"]
    assert lines(tmp_path)[2]["grad_norm"] is None
    assert lines(tmp_path)[3]["lr"] == [1e-3, 1e-4]


def test_the_header_cannot_be_mistaken(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.open({"kind": "step", "schema": "mine", "path": tmp_path, "nan": math.nan})
    sink.close(None)
    assert lines(tmp_path) == [{"kind": "header", "schema": RUN_SCHEMA, "path": str(tmp_path), "nan": "NaN"}]


def test_nan_and_infinities_survive(tmp_path: Path) -> None:
    bad = seen(3, loss=math.nan, grad_norm=math.inf, lr=(-math.inf,), metrics={"bleu": math.nan})
    write(tmp_path, bad).close(None)
    (back,) = read_run(tmp_path).steps
    assert math.isnan(back.loss or 0.0)
    assert back.grad_norm == math.inf
    assert back.lr == (-math.inf,)
    assert math.isnan(back.metrics["bleu"])


def test_the_largest_and_smallest_gradients_are_kept(tmp_path: Path) -> None:
    norms = {"a": 1.0, "b": 5.0, "none": None, "c": 0.1, "d": 3.0, "e": 0.0}
    write(tmp_path, seen(0, grad_norms=norms), seen(1, grad_norms={**norms, "bad": math.nan})).close(None)
    first, second = lines(tmp_path)[1:]
    assert list(first["largest_grads"].items()) == [("b", 5.0), ("d", 3.0)]
    assert list(first["smallest_grads"].items()) == [("e", 0.0), ("c", 0.1)]
    assert list(second["largest_grads"].items()) == [("bad", "NaN"), ("b", 5.0)]
    assert "grad_norms" not in first
    assert "readings" not in first
    assert read_run(tmp_path).steps[0].largest_grads(1) == {"b": 5.0}


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    sink = write(tmp_path, seen(0))
    assert len(lines(tmp_path)) == 2
    sink.observe(seen(1))
    assert len(lines(tmp_path)) == 3
    sink.close(None)


def test_a_killed_process_loses_nothing_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from gpt_guard.records import Observation\n"
        "from gpt_guard.sinks.files import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1]); sink.open({})\n"
        "for step in range(20): sink.observe(Observation(step=step, moment='before step'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = read_run(tmp_path)
    assert [step.step for step in run.steps] == list(range(20))
    assert not run.torn


@pytest.mark.parametrize("cut", [1, 30])
def test_a_resume_after_a_torn_line_starts_a_line_of_its_own(tmp_path: Path, cut: int) -> None:
    write(tmp_path, seen(0), seen(1)).close(None)
    file = tmp_path / "steps.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    write(tmp_path, seen(1), seen(2)).close(None)
    run = read_run(tmp_path)
    assert len(run.headers) == 2
    # Without its line end alone the line is whole; with more missing it is lost, and only it.
    assert [step.step for step in run.steps] == ([0, 1, 1, 2] if cut == 1 else [0, 1, 2])
    assert run.torn is (cut > 1)


class FullDisk:
    """A file that takes `room` bytes, then says what a full disk says."""

    def __init__(self, room: int) -> None:
        self.room, self.taken, self.closed = room, b"", False

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.room]
        self.room -= len(part)
        self.taken += part
        return len(part)

    def close(self) -> None:
        self.closed = True


def test_a_disk_that_fills_up_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = write(tmp_path, seen(0))
    sink._file.close()
    sink._file = full = FullDisk(room=40)
    for step in range(1, 5):
        sink.observe(seen(step))
    assert len(full.taken) == 40
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert sink.trouble is not None
    assert "full" in sink.trouble.causes[0]
    sink.close(None)
    assert full.closed
    assert len(read_run(tmp_path).steps) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_device_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    sink = write(tmp_path, seen(0), seen(1))
    sink.close(Report())
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_folder_that_cannot_be_made_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    sink = write(tmp_path / "file" / "run", seen(0), seen(1))
    sink.find(catalogue.finding("GG102", "NaN"), Action.WARN)
    sink.close(Report())
    assert len(caplog.records) == 1
    assert "GG905" in caplog.text


def test_observing_before_opening_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    JsonlSink(tmp_path).observe(seen(0))
    assert "call open(header) first" in caplog.text
    assert not (tmp_path / "steps.jsonl").exists()


def test_closing_twice_and_opening_again(tmp_path: Path) -> None:
    sink = write(tmp_path, seen(0))
    sink.close(None)
    sink.close(None)
    sink.open({"resumed": True})
    sink.observe(seen(1))
    sink.close(None)
    run = read_run(tmp_path)
    assert [header.get("resumed") for header in run.headers] == [None, True]
    assert len(run.steps) == 2


def test_names_that_json_must_escape(tmp_path: Path) -> None:
    name = 'layers."a"\n語'
    write(tmp_path, seen(0, grad_norms={name: 1.0})).close(None)
    assert read_run(tmp_path).steps[0].grad_norms == {name: 1.0}


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
