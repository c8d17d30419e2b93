"""Two run folders: what differs, and the first step at which they part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gpt_guard import Guardian, read_report, read_run
from gpt_guard.cli.app import app
from gpt_guard.report.compare import partings

RUN = CliRunner()


def run(folder: Path, *, lr: float = 0.1, drop_at: int | None = None, other_batch_at: int | None = None) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Guardian(model, optimizer, run_dir=folder, sinks=[], summary=False):
        for step in range(10):
            if step == drop_at:
                optimizer.param_groups[0]["lr"] = lr / 10
            x = torch.randn(8, 4) * (2.0 if step == other_batch_at else 1.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return folder


def parted(one: Path, other: Path) -> list[str]:
    return [change.what for change in partings(read_run(one), read_run(other))]


def test_equal_runs_never_part(tmp_path: Path) -> None:
    assert parted(run(tmp_path / "a"), run(tmp_path / "b")) == []


def test_a_rate_parts_first_and_the_loss_a_step_later(tmp_path: Path) -> None:
    found = parted(run(tmp_path / "a"), run(tmp_path / "b", drop_at=4))
    assert found == ["lr from step 4 on", "loss from step 5 on", "grad_norm from step 5 on"]


def test_another_batch_parts_the_loss_in_its_own_step(tmp_path: Path) -> None:
    found = partings(read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", other_batch_at=6)))
    assert [change.what for change in found] == ["loss from step 6 on", "grad_norm from step 6 on"]
    assert found[0].relative is not None
    assert found[0].relative > 0


def test_the_command_takes_folders(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", lr=0.2)
    assert read_report(one).steps == 10
    said = RUN.invoke(app, ["compare", str(one), str(other)])
    assert said.exit_code == 1
    assert "where the runs part\n  lr from step 0 on: 0.1 -> 0.2 (+100.00%)" in said.output
    same = RUN.invoke(app, ["compare", str(one), str(one)])
    assert (same.exit_code, same.output) == (0, "no difference\n")


def test_a_folder_without_a_report_is_refused_in_words(tmp_path: Path) -> None:
    said = RUN.invoke(app, ["compare", str(tmp_path), str(run(tmp_path / "a"))])
    assert said.exit_code == 2
    assert "there is no report" in said.output


@pytest.mark.parametrize("shorter", [0, 3])
def test_what_only_one_run_has_is_not_compared(tmp_path: Path, shorter: int) -> None:
    log = read_run(run(tmp_path / "a"))
    assert partings(log, log.model_copy(update={"steps": log.steps[:shorter]})) == ()
