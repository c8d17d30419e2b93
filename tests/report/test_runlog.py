"""Reading a run log back: the same records come out, a torn line costs itself only, and anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpt_guard.report.run_log
from gpt_guard import catalogue
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import RUN_SCHEMA, Action, Moment, Observation, SourceLine, TensorStats
from gpt_guard.report.run_log import LoggedMetrics, is_test_loss, is_validation_loss, read_run
from gpt_guard.sinks.files import JsonlSink

HEADER = json.dumps({"kind": "header", "schema": RUN_SCHEMA}, separators=(",", ":"))
STEP = '{"kind":"step","step":1,"lr":[0.1],"grad_norm":1.5,"moment":"before step"}'


def log(tmp_path: Path, *lines: str, end: str = "\n") -> Path:
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")
    return tmp_path


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    steps = [
        Observation(
            step=step,
            moment=Moment.BEFORE_STEP,
            loss=2.0,
            lr=(1e-3, 1e-4),
            grad_norm=3.0,
            grad_norm_clipped=1.0,
            clipped=True,
            tokens=256,
            metrics={"bleu": 0.5},
        )
        for step in range(3)
    ]
    stats = TensorStats(shape=(2, 3), dtype="torch.float32", device="cpu", numel=6, nan=1, first_bad=(0, 1))
    finding = catalogue.finding(
        "GG101",
        "NaN",
        step=2,
        module="blocks.0",
        tensor=stats,
        where=SourceLine(file="a.py", line=3, function="forward"),
        evidence={"share": 0.5, "names": ["a", "b"]},
        history=tuple(steps),
        last_healthy=steps[-1],
    )
    sink = JsonlSink(tmp_path)
    sink.open({"model": "MiniGPT"})
    for step in steps:
        sink.observe(step)
    sink.find(finding, Action.HALT)
    sink.log(2, {"rouge": 0.25})
    sink.close(None)
    for path in (tmp_path, tmp_path / "steps.jsonl", str(tmp_path)):
        run = read_run(path)
        assert run.steps == tuple(steps)
        assert run.findings == (finding,)
        assert run.metrics == (LoggedMetrics(step=2, metrics={"rouge": 0.25}),)
        assert run.headers == ({"schema": RUN_SCHEMA, "model": "MiniGPT"},)
        assert not run.torn


def test_every_cut_of_a_log_can_be_read(tmp_path: Path) -> None:
    whole = f"{HEADER}\n{STEP}\n{STEP}\n".encode()
    file = tmp_path / "steps.jsonl"
    for cut in range(1, len(whole)):
        file.write_bytes(whole[:cut])
        run = read_run(file)
        complete = [line for line in (HEADER, f"{HEADER}\n{STEP}", f"{HEADER}\n{STEP}\n{STEP}") if cut >= len(line)]
        assert len(run.headers) + len(run.steps) == len(complete)
        assert run.torn is (whole[:cut].strip() != "".join(complete[-1:]).encode())


@pytest.mark.parametrize("torn", [STEP[:20], STEP[:-1], "\0\0\0\0", '{"kind":"step","metrics":{"x":"'])
def test_a_torn_line_before_a_resume(tmp_path: Path, torn: str) -> None:
    run = read_run(log(tmp_path, HEADER, STEP, torn, HEADER, STEP))
    assert run.torn
    assert len(run.headers) == 2
    assert len(run.steps) == 2


def test_a_torn_header_before_a_resume(tmp_path: Path) -> None:
    run = read_run(log(tmp_path, HEADER[:25], HEADER, STEP))
    assert run.torn
    assert len(run.steps) == 1


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match=r"steps\.jsonl:2: .*damaged"):
        read_run(log(tmp_path, HEADER, STEP[:30], STEP))


def test_a_missing_log_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run_dir given to Guardian"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        read_run(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("lines", [["step,loss", "1,2"], ['{"step": 1}'], ["[1, 2]"], ["\x7fELF"], [STEP, HEADER]])
def test_a_foreign_file_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(GuardUsageError, match=r":1: not a gpt_guard run log"):
        read_run(log(tmp_path, *lines))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match="empty"):
        read_run(log(tmp_path, end=""))


def test_a_newer_schema_says_to_upgrade(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match=r"gpt_guard\.run/2.*newer"):
        read_run(log(tmp_path, HEADER.replace(RUN_SCHEMA, "gpt_guard.run/2"), STEP))


def test_a_version_of_any_length_is_only_another_one(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match="read it with the gpt_guard that wrote it"):
        read_run(log(tmp_path, json.dumps({"kind": "header", "schema": "gpt_guard.run/" + "9" * 5000})))


@pytest.mark.parametrize("schema", ["gpt_guard.report/1", "other", "", None, 7, "gpt_guard.run/x", "gpt_guard.run/"])
def test_another_schema_is_foreign(tmp_path: Path, schema: Any) -> None:
    with pytest.raises(GuardUsageError, match="not a gpt_guard run log"):
        read_run(log(tmp_path, json.dumps({"kind": "header", "schema": schema})))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"kind":"step","step":"many","moment":"before step"}', "damaged observation: step"),
        ('{"kind":"step","step":1,"moment":"before step","__class__":"x"}', "damaged observation: __class__"),
        ('{"kind":"step","step":1,"moment":"before step","largest_grads":[1]}', "largest_grads should be an object"),
        ('{"kind":"finding","action":"warn","code":"GG1"}', "damaged finding: title"),
        ('{"kind":"pickle","step":1}', "'pickle' is no kind of line"),
        ('{"kind":"step","step":-5,"moment":"before step"}', "damaged observation: step -5 cannot be"),
        ('{"kind":"step","step":%s,"moment":"before step"}' % ("9" * 400), "damaged observation: step 9{20} cannot be"),
        ('{"kind":"metrics","step":-1,"metrics":{}}', "damaged metrics: step -1 cannot be"),
    ],
)
def test_lines_are_validated(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(GuardUsageError, match=rf"steps\.jsonl:2: {words}"):
        read_run(log(tmp_path, HEADER, line))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_guard.report.run_log, "MAX_LINE_BYTES", 1000)
    with pytest.raises(GuardUsageError, match=r":2: this line is longer than 1000 bytes"):
        read_run(log(tmp_path, HEADER, "x" * 5000))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    deep = '{"kind":"step","metrics":' + "[" * 100_000
    with pytest.raises(GuardUsageError, match="damaged"):
        read_run(log(tmp_path, HEADER, deep, STEP))


@pytest.mark.parametrize(
    ("name", "validation", "test"),
    [
        ("val_loss", True, False),
        ("loss/validation", True, False),
        ("EvalLoss", True, False),
        ("test_loss", False, True),
        ("value_loss", False, False),
        ("interval_loss", False, False),
        ("latest_loss", False, False),
        ("val_accuracy", False, False),
        ("loss", False, False),
    ],
)
def test_a_loss_is_told_by_the_words_in_its_name(name: str, validation: bool, test: bool) -> None:
    assert (is_validation_loss(name), is_test_loss(name)) == (validation, test)
