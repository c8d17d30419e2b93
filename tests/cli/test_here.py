"""`gpt-guard` without a command says what can be done in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gpt_guard import Guardian, NonFiniteError
from gpt_guard.cli.app import app

RUN = CliRunner()


def run_in(folder: Path, *, bad: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, run_dir=folder, sinks=[], summary=False):
        for step in range(4):
            x = torch.randn(8, 4) * (float("nan") if bad and step == 2 else 1.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def test_in_a_run_folder_it_names_the_commands_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(tmp_path, bad=False)
    monkeypatch.chdir(tmp_path)
    said = RUN.invoke(app, [])
    assert said.exit_code == 0
    assert "This is the folder of a run of Sequential, 4 steps." in said.output
    assert "gpt-guard checklist during ." in said.output
    assert "replay" not in said.output


def test_after_a_halt_the_bundle_comes_first_and_each_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NonFiniteError):
        run_in(tmp_path, bad=True)
    monkeypatch.chdir(tmp_path)
    said = RUN.invoke(app, [])
    commands = [line.strip() for line in said.output.splitlines() if line.startswith("  gpt-guard")]
    assert commands[0] == "gpt-guard replay crash-step-000002 --model package.module:Class"
    explained = next(command for command in commands if "explain" in command)
    assert RUN.invoke(app, explained.split()[1:]).exit_code == 0


def test_anywhere_else_it_is_the_help_whose_sentences_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = RUN.invoke(app, [], env={"COLUMNS": "80"})
    assert said.exit_code == 0
    assert "Usage:" in said.output
    assert "..." not in said.output.partition("Commands:")[2]
    assert said.output == RUN.invoke(app, ["--help"], env={"COLUMNS": "80"}).output


def test_a_damaged_report_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run_report.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    said = RUN.invoke(app, [])
    assert said.exit_code == 0
    assert "This is the folder of a run." in said.output
