from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from breaks import BREAKS
from gpt_guard.cli.app import app

from .conftest import EXAMPLES, Run
from .reading import codes, records

ENOUGH = ("--steps", "60", "--eval-every", "20")
LEARNED = ("--steps", "150", "--eval-every", "50", "--dropout", "0")
CLASSIC = {"no-shift", "token-id", "no-mask", "lr", "freeze", "wrong-arch", "dropout"}
QUIET = {"no-shift", "no-mask", "wrong-arch", "dropout"}


@pytest.fixture
def in_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes the run's folder the current one, with the examples importable, as the printed command does."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(run)
    return run


def told(shown: str, name: str) -> list[str]:
    """The lines below "what spoke"."""
    said = shown.split(f"what spoke (--break {name}):\n")[1].split("run next:")[0]
    return [line.strip() for line in said.splitlines()]


def printed(shown: str) -> list[str]:
    """The command below "run next", without what stands before gpt-guard."""
    return shlex.split(shown.split("run next:\n")[1].splitlines()[0].split(" gpt-guard ")[1])


def gpt_guard(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(args))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.stdout.split())


def test_a_healthy_run_has_lr_beside_grad_norm_and_no_finding(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*ENOUGH)
    steps = [record for record in records(tmp_path / "run") if record["kind"] == "step"]
    assert len(steps) == 60
    assert all(step["lr"][0] > 0 and step["grad_norm"] > 0 and step["loss"] > 0 for step in steps)
    assert codes(tmp_path / "run") == set()
    assert "what spoke" not in capsys.readouterr().out


def test_a_planted_nan_halts_with_exit_code_1(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(*ENOUGH, "--break", "nan")
    assert stopped.value.code == 1
    shown = capsys.readouterr()
    assert "broken on purpose (--break nan)" in shown.out
    assert any(line.startswith("GG105") and "step 30" in line for line in told(shown.out, "nan"))
    assert "NonFiniteError" in shown.err
    assert "blocks.1.mlp" in shown.err
    assert "train_minigpt.py" in shown.err.split("stopped at:")[1]
    assert "site-packages" not in shown.err.split("stopped at:")[1]
    assert any(code.startswith("GG1") for code in codes(tmp_path / "run"))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "mini_gpt_latest.pt")
    assert all(weight.isfinite().all() for weight in saved["model_state_dict"].values())


def test_the_planted_nan_is_found_again_in_what_the_run_left(
    train: Run, in_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(*ENOUGH, "--break", "nan")
    shown = capsys.readouterr()
    assert "crash-step-000030" in shown.err
    status, out = gpt_guard(*printed(shown.out))
    assert status == 1
    assert "blocks.1.mlp.up.weight" in out
    assert "The same fault at the same place." in out


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("lr", ("GG2", "GG3", "GG4")),
        ("freeze", ("GG3",)),
        ("python-list", ("GG303",)),
        ("no-eval", ("GG501",)),
    ],
)
def test_each_break_makes_its_guard_speak(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, families: tuple[str, ...]
) -> None:
    train(*ENOUGH, "--break", name)
    shown = capsys.readouterr().out
    worse_than_info = [r for r in records(tmp_path / "run") if r["kind"] == "finding" and r["severity"] != "info"]
    found = [record["code"] for record in worse_than_info if record["code"].startswith(families)]
    assert found, worse_than_info
    assert f"broken on purpose (--break {name})" in shown
    assert any(line.startswith(found[0]) for line in told(shown, name))


@pytest.mark.parametrize(
    ("name", "guard", "stage", "code"),
    [("no-shift", "LossInputs", "Initial loss", "GG658"), ("no-mask", "ModelProbe", "Causality", "GG660")],
)
def test_what_is_there_from_the_first_step_is_found_in_it_and_by_the_printed_command(
    train: Run, in_run: Path, capsys: pytest.CaptureFixture[str], name: str, guard: str, stage: str, code: str
) -> None:
    train(*LEARNED, "--break", name)
    shown = capsys.readouterr().out
    assert [line.split(", ", 1)[1] for line in told(shown, name)] == [f"step 0, {guard}"]
    status, out = gpt_guard(*printed(shown))
    assert status == 1
    assert stage in out
    assert code in out
    assert name != "no-shift" or "It repeats its input" in out


def test_the_same_commands_find_nothing_in_a_healthy_run(train: Run, in_run: Path) -> None:
    train(*LEARNED)
    for name in ("no-shift", "no-mask", "token-id", "python-list"):
        command = re.sub(r" --model \S+", "", BREAKS[name].command)
        status, out = gpt_guard(*command.split())
        assert status == 0, out


def test_an_id_beyond_the_vocabulary_is_named_before_it_stops_torch_and_is_found_in_the_file(
    train: Run, in_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IndexError):
        train(*ENOUGH, "--break", "token-id")
    shown = capsys.readouterr().out
    named, stopped = told(shown, "token-id")
    assert named.startswith("GG631")
    assert stopped.startswith("torch itself: IndexError")
    status, out = gpt_guard(*printed(shown))
    assert status == 1
    assert "GG631" in out


def test_layers_in_a_list_are_found_before_training(
    train: Run, in_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*ENOUGH, "--break", "python-list")
    status, out = gpt_guard(*printed(capsys.readouterr().out))
    assert status == 1
    assert "GG303" in out


def test_a_checkpoint_is_refused_by_models_of_other_sizes(
    train: Run, in_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*ENOUGH, "--break", "wrong-arch")
    shown = capsys.readouterr().out
    said = "\n".join(told(shown, "wrong-arch"))
    for size in ("vocabulary", "width", "layers"):
        assert re.search(rf"another [a-z ]*{size}: GG70[25] ", said), said
    status, out = gpt_guard(*printed(shown))
    assert status == 1
    assert "GG705" in out


def test_dropout_is_no_bug_and_is_compared(train: Run, in_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = train(*ENOUGH, "--break", "dropout")
    assert script["config"].dropout == 0.2
    shown = capsys.readouterr().out
    assert told(shown, "dropout") == ["nothing"]
    command = printed(shown)
    assert command == ["check", "--only", "overfit", "--compare-dropout"]
    status, out = gpt_guard(*command, "--overfit-steps", "100")
    assert "dropout" in out.split("Overfit")[-1].lower() or "dropout" in out
    assert status in (0, 1)


def test_the_printed_line_can_be_pasted_into_a_shell(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--steps", "2", "--break", "freeze", out="a folder with blanks")
    line = capsys.readouterr().out.split("run next:\n")[1].splitlines()[0]
    program = shlex.join([sys.executable, "-c", "from gpt_guard.cli.app import main; main()"])
    line = line.replace(" gpt-guard ", f" {program} ")
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("GG307")


def test_every_break_says_what_is_broken_what_should_speak_and_what_to_run() -> None:
    assert set(BREAKS) == CLASSIC | {"nan", "python-list", "no-eval"}
    for name, each in BREAKS.items():
        assert each.what
        assert each.speaks
        assert each.command.startswith(("check ", "explain ", "replay "))
        assert name not in QUIET or each.command.startswith("check ")
