"""`gpt-guard replay` in a process that knows nothing of the run: the same fault, its absence, and unusable input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from gpt_guard import Guardian
from gpt_guard.cli.app import app
from gpt_guard.errors import GuardError
from gpt_guard.records.render import WIDTH

from .conftest import HERE, Fail, Failed
from .failing_models import CAUSES, OwnLoss, log_loss

MODULE = "failing_models"
# One new process for several calls: importing torch is what takes the time.
CALLS = """
import contextlib, io, json, sys
from typer.testing import CliRunner
from gpt_guard.cli.app import app
runs = [CliRunner().invoke(app, ["replay", *args]) for args in json.loads(sys.argv[1])]
print(json.dumps([[run.exit_code, run.stdout, run.stderr] for run in runs]))
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join((self.out + self.err).split())

    @property
    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


def in_another_process(*calls: list[str]) -> list[Said]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(calls)],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [Said(*each) for each in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which the models can be imported, as a person would stand in it."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))


def replay(*args: str | Path) -> Said:
    done = CliRunner().invoke(app, ["replay", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Said(done.exit_code, done.stdout, done.stderr)


def test_five_causes_come_back_in_a_fresh_process_and_go_when_they_are_mended(fail: Fail) -> None:
    failed = {cause: fail(cause) for cause in CAUSES}
    calls = [[str(run.path), "--json", "--model", f"{MODULE}:{CAUSES[cause][1]}"] for cause, run in failed.items()]
    *answers, shown, same_code, mended = in_another_process(
        *calls,
        [str(failed["log"].path), "--model", f"{MODULE}:LogOfZero"],
        [str(failed["log"].path), "--model", f"{MODULE}:mended_log"],
        [str(failed["log"].path), "--model", f"{MODULE}:mended_log", "--mended"],
    )
    for (cause, run), said in zip(failed.items(), answers, strict=True):
        told, before = said.answer, run.finding.operation
        assert said.code == 1, cause
        assert told["reproduced"]
        assert told["same"]
        assert before is not None
        again = told["finding"]["operation"]
        assert (again["name"], again["phase"], again["module"]) == (before.name, before.phase, before.module)
        assert before.where is not None
        assert (again["where"]["line"], again["shows"]) == (before.where.line, before.shows)
        assert told["finding"]["module"] == run.finding.module
        assert told["finding"]["causes"] == list(run.finding.causes)
        assert told["notes"] == []
    assert shown.code == 1
    assert shown.out.startswith("GG101 Non-finite values in a module's output")
    assert "The same fault at the same place." in shown.out
    assert max(map(len, shown.out.splitlines())) <= WIDTH
    assert same_code.code == 2
    assert "although the code is what it was in the run (failing_models.py" in same_code.words
    assert "not as recorded: `eps` was 0.0, is 0.001" in same_code.words
    assert mended.code == 0
    assert "The fault does not show any more" in mended.words


@pytest.mark.usefixtures("here")
def test_nothing_that_a_bundle_names_is_run_unless_it_is_asked_for(fail: Fail) -> None:
    failed = fail("log")
    said = replay(failed.path)
    assert said.code == 2
    assert "LogOfZero" in said.err
    assert "say which code builds the model" in said.err
    source = json.loads((failed.path / "source.json").read_text())
    assert source["qualname"] == "LogOfZero"


@pytest.mark.usefixtures("here")
def test_the_recorded_class_is_built_where_its_source_is_trusted(fail: Fail) -> None:
    assert replay(fail("log").path, "--trust-source").code == 1


@pytest.mark.usefixtures("here")
def test_a_source_that_is_no_model_is_not_called(fail: Fail, tmp_path: Path) -> None:
    from .test_bundle import reseal

    path = fail("log").path
    made = tmp_path / "made"
    source = {"module": "os", "qualname": "mkdir", "config": {"path": str(made)}}
    (path / "source.json").write_text(json.dumps(source))
    reseal(path, "source.json")
    said = replay(path, "--trust-source")
    assert said.code == 2
    assert "is no class of a model" in said.words
    assert not made.exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", f"{MODULE}:other_size"], "does not fit the bundle"),
        (["--model", f"{MODULE}:no_model"], "not an nn.Module"),
        (["--model", f"{MODULE}:broken_factory"], "RuntimeError: cannot be built"),
        (["--model", f"{MODULE}:CAUSES"], "is a dict"),
        (["--model", f"{MODULE}:Nothing"], "has no Nothing"),
        (["--model", "no_such_module:Net"], "there is no module no_such_module"),
        (["--model", f"{MODULE}:Guarded"], "has no Guarded"),
        (["--model", f"{MODULE}:log_loss"], "needs output, target"),
        (["--model", f"{MODULE}:LogOfZero", "--device", "cuda:99"], "no such device"),
        (["--model", f"{MODULE}:LogOfZero", "--loss", f"{MODULE}:log_loss"], "watch_loss"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2_with_a_remedy(fail: Fail, options: list[str], words: str) -> None:
    said = replay(fail("log").path, *options)
    assert said.code == 2
    assert words in said.words
    assert "Traceback" not in said.words
    assert said.out == ""


@pytest.mark.usefixtures("here")
def test_a_damaged_bundle_is_exit_code_2(fail: Fail, tmp_path: Path) -> None:
    path = fail("log").path
    (path / "batch.pt").write_bytes(b"PK")
    assert "cut short" in replay(path, "--model", f"{MODULE}:LogOfZero").err
    assert "is not there" in replay(tmp_path / "gone", "--model", f"{MODULE}:LogOfZero").err


@pytest.mark.usefixtures("here")
def test_a_replay_over_its_limit_is_exit_code_2(fail: Fail) -> None:
    said = replay(fail("log").path, "--model", f"{MODULE}:slow_log", "--limit", "0.2")
    assert said.code == 2
    assert "No answer" in said.words


@pytest.mark.usefixtures("here")
def test_a_loss_outside_of_the_model_is_given_by_name(tmp_path: Path) -> None:
    model = OwnLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guardian = Guardian(model, optimizer, run_dir=tmp_path, sinks=[])
    loss_of = guardian.watch_loss(log_loss)
    with pytest.raises(GuardError) as caught, guardian:
        loss_of(model(torch.eye(4) * 1e4), torch.full((4, 4), 0.25)).backward()
    failed = Failed(caught.value.finding, tmp_path, Path(str(caught.value.finding.bundle)))
    options = (failed.path, "--model", f"{MODULE}:OwnLoss")
    alone = replay(*options)
    assert alone.code == 2
    assert "log_loss was not run: give it as" in alone.words
    assert replay(*options, "--loss", f"{MODULE}:log_loss").code == 1
    other = replay(*options, "--loss", f"{MODULE}:mended_loss")
    assert other.code == 2
    assert other.words.startswith("Not what the bundle was made of: the loss function was ")
    assert "failing_models.mended_loss" in other.words
    assert replay(*options, "--loss", f"{MODULE}:mended_loss", "--mended").code == 0


def test_the_bundle_of_the_example_opens_with_the_printed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that takes a config is built from the settings that the bundle has of it."""
    from mini_gpt import MiniGPT, MiniGPTConfig

    monkeypatch.chdir(tmp_path)
    config = MiniGPTConfig(vocab_size=11, block_size=8, embedding_dim=8, num_heads=2, num_layers=1)
    model = MiniGPT(config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up.weight")[0, 0] = float("nan")
    with pytest.raises(GuardError) as caught, Guardian(model, optimizer, run_dir="run", sinks=[]):
        model(torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))
    named = caught.value.finding.bundle_model
    assert named is not None
    assert named.endswith("examples/mini_gpt.py:MiniGPT")  # it cannot be imported by name from here
    said = replay(str(caught.value.finding.bundle), "--model", named)
    assert said.code == 1
    assert "The same fault at the same place." in said.words
    assert "blocks.0.mlp.up.weight" in said.words
