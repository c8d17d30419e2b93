"""`gpt-guard check` in a project's folder: what it reads, what it says, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gpt_guard.checks.environment import stage as environment
from gpt_guard.checks.files.project import Project, load_project
from gpt_guard.checks.runner.base import select
from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import preflight
from gpt_guard.cli.app import app
from gpt_guard.cli.show import CheckScreen
from gpt_guard.records.render import WIDTH
from mini_gpt import MiniGPT, MiniGPTConfig

CHARS = list("abcdefghij\n")
QUICK = ("--only", "environment", "--only", "files")


@pytest.fixture(autouse=True)
def a_plain_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No accelerator, and modules that a test imported are forgotten."""
    monkeypatch.setattr(environment, "accelerators", list)
    monkeypatch.setattr(environment, "nvidia_device", lambda: False)
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained project as the example leaves it."""
    for folder in ("checkpoints", "tokenizer", "data/encoded"):
        (tmp_path / folder).mkdir(parents=True)
    config = MiniGPTConfig(len(CHARS), block_size=8, embedding_dim=8, num_heads=2)
    model = MiniGPT(config)
    payload = {"config": dataclasses.asdict(config), "model_state_dict": model.state_dict(), "step": 10}
    torch.save(payload, tmp_path / "checkpoints/mini_gpt_best.pt")
    (tmp_path / "tokenizer/char_tokenizer.json").write_text(json.dumps({"chars": CHARS}))
    for split, count in (("train", 500), ("val", 60)):
        torch.save(torch.randint(len(CHARS), (count,)), tmp_path / f"data/encoded/{split}_ids.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["check", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.stderr
    return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())


def report_of(path: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in PreflightReport.load(path).checks:
        found.setdefault(line.stage, {})[line.title] = line.status
    return found


def test_a_healthy_project_is_found_in_the_current_folder(project: Path) -> None:
    code, out, err = run(*QUICK, "--json", "report.json")
    assert (code, err) == (0, "")
    assert "mini_gpt:MiniGPT, " in out
    assert "with the checkpoint's weights" in out
    assert "1 Environment" in out
    assert "✓ train: train_ids.pt" in out
    files = report_of(project / "report.json")["files"]
    assert files == {
        "checkpoint": "passed",
        "tokenizer": "passed",
        "train": "passed",
        "val": "passed",
        "test": "skipped",
    }


def test_the_report_carries_the_model_and_its_vocabulary(project: Path) -> None:
    run(*QUICK, "--json", "report.json", "--seed", 7)
    report = PreflightReport.load("report.json")
    assert report.model == "MiniGPT"
    assert report.facts["vocab_size"] == len(CHARS)
    assert report.environment["seed"] == "7"


def test_without_a_checkpoint_it_checks_what_there_is(project: Path) -> None:
    (project / "checkpoints/mini_gpt_best.pt").unlink()
    code, out, _ = run(*QUICK)
    assert code == 0
    assert "untrained" in out
    assert "there is no checkpoints/mini_gpt_best.pt" in out


def test_fresh_leaves_the_weights_aside(project: Path) -> None:
    assert "untrained" in run(*QUICK, "--fresh")[1]


def test_weights_that_do_not_fit_are_for_the_checkpoints_stage(project: Path) -> None:
    path = project / "checkpoints/mini_gpt_best.pt"
    payload = torch.load(path)
    payload["config"]["num_layers"] = 3
    torch.save(payload, path)
    code, out, _ = run(*QUICK)
    assert code == 0
    assert "do not fit" in out


def test_without_a_model_the_rest_is_checked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mini_gpt", None)
    code, out, _ = run(*QUICK)
    assert code == 0
    assert "no model: there is no mini_gpt:MiniGPT" in out
    assert "train_ids.pt" in out


def test_nothing_at_all_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mini_gpt", None)
    code, _, err = run()
    assert code == 2
    assert "nothing to check" in err
    assert "train_ids.pt" in err


@pytest.mark.parametrize("option", ["--checkpoint", "--tokenizer", "--train-data", "--val-data", "--test-data"])
def test_a_file_that_was_asked_for_must_be_there(project: Path, option: str) -> None:
    code, out, err = run(option, "nowhere/gone.pt")
    assert code == 2
    assert "nowhere/gone.pt" in err
    assert "There is no such file" in out
    assert "3 Tokenizer" not in out


UNUSABLE = ["checkpoints/mini_gpt_best.pt", "tokenizer/char_tokenizer.json", "data/encoded/train_ids.pt"]


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("how", ["empty", "truncated", "wrong type"])
def test_unusable_files_are_named_with_a_remedy(project: Path, name: str, how: str) -> None:
    path = project / name
    raw = path.read_bytes()
    if how == "wrong type":
        torch.save([None], path)
    else:
        path.write_bytes(raw[: len(raw) // 2] if how == "truncated" else b"")
    code, out, err = run("--json", "report.json")
    assert code == 2
    assert name in err
    assert "fix" in out
    assert "failed" in report_of(project / "report.json")["files"].values()


def test_a_failed_check_is_exit_code_1_and_its_finding_is_shown(project: Path) -> None:
    torch.save(torch.zeros(4, dtype=torch.int64), project / "data/encoded/val_ids.pt")
    code, out, _ = run(*QUICK)
    assert code == 1
    assert "✗ val: val_ids.pt" in out
    assert "GG616" in out
    assert "1 failed" in out


def test_stages_are_chosen_by_name_or_number(project: Path) -> None:
    assert "2 Files" not in run("--only", 1)[1]
    code, out, _ = run(*QUICK, "--skip", "environment")
    assert code == 0
    assert "1 Environment" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "tokenisation"], "3 tokenizer"),
        (["--skip", "99"], "14 generation"),
        (["--only", "3", "--skip", "tokenizer"], "no stage is left to run"),
        (["--device", "tpu9"], "no such device"),
        (["--model", "mini_gpt"], "package.module:Name"),
        (["--model", "own_missing:Model"], "no module own_missing"),
        (["--model", "mini_gpt:Nothing"], "its classes are"),
        (["--config", "mini_gpt:Nothing"], "has no Nothing"),
        (["--model", "json:decoder"], "give a class or a function"),
        (["--model", "mini_gpt:MiniGPT", "--config", "json:JSONDecoder"], "failed: TypeError"),
    ],
)
def test_unusable_arguments(project: Path, arguments: list[str], words: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err


def test_a_device_that_is_not_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("--device", "cuda")
    assert code == 2
    assert "--device cpu" in err


def own_module(project: Path, name: str, text: str) -> None:
    (project / f"{name}.py").write_text(text, encoding="utf-8")


def test_a_module_that_raises_is_named_with_its_line(project: Path) -> None:
    own_module(project, "own_broken", "import math\n\nmath.sqrt(-1)\n")
    code, _, err = run("--model", "own_broken:Model")
    assert code == 2
    assert "ValueError" in err
    assert "own_broken.py:3" in err


def test_a_module_whose_own_import_is_missing_is_not_called_missing(project: Path) -> None:
    own_module(project, "own_import", "import a_package_that_is_not_installed\n")
    _, _, err = run("--model", "own_import:Model")
    assert "a_package_that_is_not_installed" in err
    assert "no module own_import" not in err


FACTORY = """
from mini_gpt import MiniGPT, MiniGPTConfig
def make_model(): return MiniGPT(MiniGPTConfig(11, 8, 8, 2))
def make_number(): return 3
def make_sized(vocab_size, block_size=8, **rest): return MiniGPT(MiniGPTConfig(vocab_size, block_size, 8, 2))
model = make_model()
"""


@pytest.mark.parametrize("name", ["make_model", "make_sized", "model"])
def test_factories_and_finished_models(project: Path, name: str) -> None:
    own_module(project, "own_factory", FACTORY)
    code, out, _ = run(*QUICK, "--model", f"own_factory:{name}")
    assert code == 0
    assert "with the checkpoint's weights" in out


def test_a_factory_that_gives_something_else(project: Path) -> None:
    own_module(project, "own_factory", FACTORY)
    code, _, err = run("--model", "own_factory:make_number")
    assert code == 2
    assert "gave a int" in err


def test_an_unknown_setting_in_the_saved_config_is_unusable(project: Path) -> None:
    path = project / "checkpoints/mini_gpt_best.pt"
    payload = torch.load(path)
    payload["config"]["rope_theta"] = 1e4
    torch.save(payload, path)
    code, _, err = run()
    assert code == 2
    assert "rope_theta" in err
    assert "mini_gpt_best.pt" in err


def test_nothing_in_a_file_is_executed(project: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(project / "executed"),)

    torch.save({"model": Hostile()}, project / "checkpoints/mini_gpt_best.pt")
    code, out, _ = run()
    assert code == 2
    assert "nothing of it was run" in out
    assert not (project / "executed").exists()


def test_an_unwritable_report_is_said(project: Path) -> None:
    (project / "blocked").write_text("a file, not a folder")
    code, out, err = run(*QUICK, "--json", "blocked/report.json")
    assert code == 2
    assert "--json" in err
    assert "passed" in out


def test_a_terminal_without_unicode(project: Path) -> None:
    code = "import sys; from gpt_guard.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--only", "environment"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=project,
    )
    assert "Traceback" not in done.stderr
    assert "+  Python" in done.stdout


def test_the_help_names_the_defaults() -> None:
    done = CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    for part in ("mini_gpt:MiniGPT", "checkpoints/mini_gpt_best.pt", "tokenizer/char_tokenizer.json", "train_ids.pt"):
        assert part in text
    for option in ("--overfit-steps", "--skip-overfit", "--fresh", "--json", "--only", "--skip", "--seed", "--device"):
        assert option in text


def test_an_interrupt_is_neither_a_pass_nor_a_failure(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment.EnvironmentStage, "run", interrupted)
    code, _, err = run(*QUICK, "--json", "report.json")
    assert code == 130
    assert "interrupted" in err
    assert not (project / "report.json").exists()


@pytest.mark.parametrize(("columns", "widest"), [(60, 60), (80, 80), (400, 120)])
def test_lines_fit_the_terminal(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, widest: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    torch.save(torch.zeros(4, dtype=torch.int64), project / "data/encoded/val_ids.pt")
    with CheckScreen() as live:
        subject = load_project(Project(paths={"val": project / "data/encoded/val_ids.pt"}))
        live.end(preflight(subject, select([1, 2]), live.result))
    lines = capsys.readouterr().out.split("\n")
    shown = [len(re.sub("\x1b\\[[0-9;]*m", "", line)) for line in lines]
    assert max(shown) <= widest
    assert max(shown) > 0.8 * widest


def test_a_pipe_gets_the_usual_width(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = CliRunner().invoke(app, ["check", *map(str, QUICK)])
    assert 80 < max(map(len, done.stdout.split("\n"))) <= WIDTH
