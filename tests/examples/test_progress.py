from __future__ import annotations

import io
import sys

import pytest

from progress import TrainingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with TrainingProgress(0, 40, tokens=256) as bar:
        for step in range(10, 41, 10):
            bar.show(step, loss=2.5, lr=3e-3, grad_norm=0.75)
    shown = terminal.getvalue().replace("\x1b", "").rsplit("\r", 1)[-1]
    for figure in ("40/40", "loss 2.500", "lr 3.0e-03", "grad norm 0.75", "tokens/s"):
        assert figure in shown


def test_a_file_gets_about_twenty_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(0, 1000, tokens=256) as bar:
        for step in range(10, 1001, 10):
            bar.show(step, loss=2.5, lr=3e-3, grad_norm=0.75)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 20
    assert lines[-1].startswith("step  1000/1000  loss 2.500  lr 3.0e-03  grad norm 0.75")


def test_a_resumed_run_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(900, 1000, tokens=256) as bar:
        bar.show(950, loss=2.5, lr=3e-3, grad_norm=0.75)
        bar.show(1000, loss=2.5, lr=3e-3, grad_norm=0.75)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert [line.split()[1] for line in lines] == ["950/1000", "1000/1000"]
