from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "train_minigpt.py"
TEXT = "".join(f"{number} times {number + 1} makes {number * (number + 1)}.\n" for number in range(400))

Run = Callable[..., dict[str, Any]]
Refusal = Callable[..., str]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_file: Path) -> Run:
    """Run the script in this process, small, and return its globals."""

    def run(*options: str, script: Path = SCRIPT, corpus: Path = text_file, out: str = "run") -> dict[str, Any]:
        given = ["--corpus", str(corpus), "--out", str(tmp_path / out), "--device", "cpu", *options]
        monkeypatch.setattr(sys, "argv", [str(script), *given])
        with torch.random.fork_rng(devices=[]):
            return runpy.run_path(str(script), run_name="__main__")

    return run


@pytest.fixture
def plain_script(tmp_path: Path) -> Path:
    """The script without its guard lines, in a folder in which gpt_guard cannot be imported."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for source in EXAMPLES.glob("*.py"):
        if source.name not in ("breaks.py", "halt.py"):
            lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if not line.rstrip().endswith("# guard")]
            (folder / source.name).write_text("".join(kept), encoding="utf-8")
    (folder / "gpt_guard.py").write_text("raise ImportError('not installed')\n")
    return folder / SCRIPT.name


@pytest.fixture
def refused(train: Run, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run the script and return what it says when it stops with exit code 2."""

    def run(*options: str, **where: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            train(*options, **where)
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run
