from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints

from .conftest import TEXT, Refusal, Run
from .reading import load, logged_losses, same

SHORT = ("--steps", "20", "--eval-every", "5")


def test_a_resumed_run_equals_an_uninterrupted_one(train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(*SHORT, "--dropout", "0.2", out="whole")
    save = checkpoints.save_atomically

    def save_then_die(content: Any, path: Path) -> None:
        save(content, path)
        if path.name == "mini_gpt_latest.pt" and content["step"] == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save_atomically", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        train(*SHORT, "--dropout", "0.2", out="parts")
    monkeypatch.setattr(checkpoints, "save_atomically", save)
    assert load(tmp_path / "parts")["step"] == 10
    train("--resume", out="parts")
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    for key in sorted(checkpoints.KEYS):
        assert same(whole[key], parts[key]), key
    losses = logged_losses(tmp_path / "parts")
    assert len(losses) == 20
    assert losses == logged_losses(tmp_path / "whole")


def test_resume_goes_on_when_more_steps_are_asked_for(train: Run, tmp_path: Path) -> None:
    train("--steps", "6", "--batch-size", "4")
    script = train("--resume", "--steps", "9")
    assert script["args"].batch_size == 4
    assert load(tmp_path / "run")["step"] == 9
    assert load(tmp_path / "run")["settings"]["batch_size"] == 4


def test_resume_of_a_finished_run_trains_no_further(train: Run, tmp_path: Path) -> None:
    train("--steps", "6")
    before = load(tmp_path / "run")["model_state_dict"]
    train("--resume")
    assert same(before, load(tmp_path / "run")["model_state_dict"])


def test_a_run_with_another_tokenizer_is_refused_and_left_as_it_is(
    train: Run, refused: Refusal, tmp_path: Path
) -> None:
    train("--steps", "2")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("times", "TIMES"), encoding="utf-8")
    said = refused("--resume", corpus=other)
    assert "belongs to another tokenizer" in said
    assert load(tmp_path / "run")["tokenizer_fingerprint"] in said
    assert "the first id that differs is 13: 'a' there, 'E' here" in said
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_resume_without_a_checkpoint_or_with_a_bad_one(train: Run, refused: Refusal, tmp_path: Path) -> None:
    assert "mini_gpt_latest.pt: no checkpoint to resume from" in refused("--resume")
    path = tmp_path / "run" / "checkpoints" / "mini_gpt_latest.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK\x03\x04 cut off")
    assert "mini_gpt_latest.pt: damaged or not a checkpoint" in refused("--resume")
    torch.save({"step": 3}, path)
    assert "lacks best_val_loss, config" in refused("--resume")


def test_resume_of_a_run_whose_blocks_were_never_saved(train: Run, refused: Refusal) -> None:
    train("--steps", "2", "--break", "python-list")
    said = refused("--resume")
    assert "does not fit this model and optimizer" in said
    assert "blocks.0.attention_norm.weight" in said


def test_a_new_run_never_writes_over_another(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--steps", "2")
    first = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for number in (2, 3):
        train("--steps", "1")
        assert f"{tmp_path / 'run'} holds a run already: this one goes to {tmp_path / f'run-{number}'}" in (
            capsys.readouterr().out
        )
        assert load(tmp_path / f"run-{number}")["step"] == 1
    assert first == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    train("--resume", "--steps", "3")
    assert load(tmp_path / "run")["step"] == 3
