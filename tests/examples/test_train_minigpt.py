from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from char_tokenizer import CharTokenizer
from mini_gpt import MiniGPT, MiniGPTConfig

from .conftest import TEXT, Run
from .reading import load

SHORT = ("--steps", "20", "--eval-every", "5")


def test_everything_is_written_below_out(train: Run, tmp_path: Path) -> None:
    train(*SHORT)
    run = tmp_path / "run"
    assert not list(run.rglob("*.unfinished"))
    chars = json.loads((run / "tokenizer" / "char_tokenizer.json").read_text(encoding="utf-8"))["chars"]
    text = ""
    for split in ("train", "val", "test"):
        ids = torch.load(run / "data" / "encoded" / f"{split}_ids.pt")
        assert ids.dim() == 1
        assert ids.dtype == torch.int64
        text += CharTokenizer(chars).decode(ids.tolist())
    assert text == TEXT


def test_checkpoints_hold_what_another_program_needs(train: Run, tmp_path: Path) -> None:
    train(*SHORT)
    tokenizer = CharTokenizer.load(tmp_path / "run" / "tokenizer" / "char_tokenizer.json")
    for name in ("best", "latest"):
        checkpoint = load(tmp_path / "run", name)
        assert type(checkpoint["config"]) is dict
        model = MiniGPT(MiniGPTConfig(**checkpoint["config"]))
        model.load_state_dict(checkpoint["model_state_dict"])
        assert checkpoint["tokenizer_fingerprint"] == tokenizer.fingerprint
        assert checkpoint["optimizer_state_dict"]["state"]
    assert load(tmp_path / "run")["step"] == 20


def test_loss_falls_well_below_an_even_guess(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = train("--steps", "150", "--eval-every", "50", "--dropout", "0")
    even = math.log(len(script["tokenizer"]))
    assert script["best_val_loss"] < 0.6 * even
    shown = capsys.readouterr()
    validations = [float(line.split()[-1]) for line in shown.out.splitlines() if line.startswith("step ")]
    assert validations == sorted(validations, reverse=True)
    assert len(validations) == 3
    assert "a sample:" in shown.out
    progress = [line for line in shown.err.splitlines() if line.startswith("step ")]
    assert len(progress) >= 10
    assert all(word in progress[-1] for word in ("150/150", "loss", "lr", "grad norm", "tokens/s"))


def test_best_checkpoint_is_that_of_the_lowest_validation_loss(train: Run, tmp_path: Path) -> None:
    script = train("--steps", "30", "--eval-every", "10", "--lr", "0.05")
    best = load(tmp_path / "run", "best")
    model = MiniGPT(MiniGPTConfig(**best["config"]))
    model.load_state_dict(best["model_state_dict"])
    assert script["evaluate"](model, script["val_ids"]) == best["best_val_loss"] == script["best_val_loss"]
    assert best["best_val_loss"] <= load(tmp_path / "run")["best_val_loss"]


def test_learning_rate_warms_up_and_falls_to_a_tenth(train: Run) -> None:
    script = train("--steps", "20")
    factors = [script["warmup_then_cosine"](step) for step in range(21)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert factors[20] == pytest.approx(0.1)
    assert script["scheduler"].get_last_lr()[0] == pytest.approx(3e-4)


def test_validation_restores_the_mode_and_draws_nothing(train: Run) -> None:
    script = train("--steps", "1")
    model, state = script["model"], torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        first = script["evaluate"](model, script["val_ids"])
        assert all(module.training == training for module in model.modules())
        assert script["evaluate"](model, script["val_ids"]) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_characters_that_only_validation_has_are_known(train: Run, tmp_path: Path) -> None:
    folder = tmp_path / "splits"
    folder.mkdir()
    for split, letter in (("train", "a"), ("valid", "é"), ("test", "日")):
        (folder / f"{split}.txt").write_text(f"{letter} b c\n" * 40, encoding="utf-8")
    script = train("--steps", "2", corpus=folder)
    assert {"a", "é", "日"} <= set(script["tokenizer"].chars)
