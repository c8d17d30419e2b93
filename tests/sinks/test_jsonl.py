"""The run log: lr beside grad norm on each line, NaN kept, nothing lost to a kill, no trouble for the training."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt_guard import catalogue
from gpt_guard.records import RUN_SCHEMA, Action, Moment, Observation, Report
from gpt_guard.report.run_log import read_run
from gpt_guard.sinks.jsonl import JsonlSink


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
        "from gpt_guard.sinks.jsonl import JsonlSink\n"
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
