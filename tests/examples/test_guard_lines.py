from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import checkpoints

from .conftest import Run
from .reading import load, same

SHORT = ("--steps", "20", "--eval-every", "5")


def test_without_its_guard_lines_it_is_a_plain_script(
    plain_script: Path, train: Run, tmp_path: Path, text_file: Path
) -> None:
    assert "guard" not in plain_script.read_text(encoding="utf-8").split('"""', 2)[2]
    out = tmp_path / "plain_run"
    command = [sys.executable, str(plain_script), "--corpus", str(text_file), "--out", str(out), "--device", "cpu"]
    for options in (["--steps", "10", "--eval-every", "5"], ["--resume", "--steps", "20"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "a sample:" in done.stdout
    assert load(out)["step"] == 20
    assert not (out / "steps.jsonl").exists()


def test_guard_lines_change_nothing_in_what_is_trained(plain_script: Path, train: Run, tmp_path: Path) -> None:
    train(*SHORT, "--dropout", "0.2", out="guarded")
    train(*SHORT, "--dropout", "0.2", out="plain", script=plain_script)
    guarded, plain = load(tmp_path / "guarded"), load(tmp_path / "plain")
    for key in sorted(checkpoints.KEYS):
        assert same(guarded[key], plain[key]), key
