from __future__ import annotations

from pathlib import Path

import pytest
import torch

from breaks import BREAKS

from .conftest import Run
from .reading import codes, records

ENOUGH = ("--steps", "60", "--eval-every", "20")


def test_a_healthy_run_has_lr_beside_grad_norm_and_no_finding(train: Run, tmp_path: Path) -> None:
    train(*ENOUGH)
    steps = [record for record in records(tmp_path / "run") if record["kind"] == "step"]
    assert len(steps) == 60
    assert all(step["lr"][0] > 0 and step["grad_norm"] > 0 and step["loss"] > 0 for step in steps)
    assert codes(tmp_path / "run") == set()


def test_a_planted_nan_halts_with_exit_code_1(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(*ENOUGH, "--break", "nan")
    assert stopped.value.code == 1
    shown = capsys.readouterr()
    assert "broken on purpose (--break nan)" in shown.out
    assert "NonFiniteError" in shown.err
    assert "blocks.1.mlp" in shown.err
    assert "train_minigpt.py" in shown.err.split("stopped at:")[1]
    assert "site-packages" not in shown.err.split("stopped at:")[1]
    assert any(code.startswith("GG1") for code in codes(tmp_path / "run"))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "mini_gpt_latest.pt")
    assert all(weight.isfinite().all() for weight in saved["model_state_dict"].values())


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("lr", ("GG2", "GG3", "GG4")),
        ("freeze", ("GG3",)),
        ("list", ("GG303",)),
        ("no-eval", ("GG501",)),
    ],
)
def test_each_break_makes_its_guard_speak(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, families: tuple[str, ...]
) -> None:
    train(*ENOUGH, "--break", name)
    shown = capsys.readouterr()
    found = codes(tmp_path / "run")
    assert f"broken on purpose (--break {name})" in shown.out
    assert [code for code in found if code.startswith(families)], found


def test_every_break_says_what_is_broken_and_who_should_speak() -> None:
    assert set(BREAKS) >= {"nan", "lr", "freeze", "list", "no-eval"}
    assert all(each.what and each.speaks for each in BREAKS.values())
