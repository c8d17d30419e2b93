from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from char_tokenizer import CharTokenizer
from mini_gpt import MiniGPT, MiniGPTConfig

from .conftest import SCRIPT, TEXT, Run

SHORT = ("--steps", "20", "--eval-every", "5")


def load(run: Path, name: str = "latest") -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run / "checkpoints" / f"mini_gpt_{name}.pt")
    return content


def same(first: Any, second: Any) -> bool:
    """Bit by bit, through nested dicts and lists."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


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


def refusal(capsys: pytest.CaptureFixture[str], train: Run, *options: str, **where: Any) -> str:
    """What the script says when it stops with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        train(*options, **where)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_resume_refuses_another_tokenizer(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--steps", "2")
    tokenizer = tmp_path / "run" / "tokenizer" / "char_tokenizer.json"
    before = tokenizer.read_bytes(), load(tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("times", "TIMES"), encoding="utf-8")
    said = refusal(capsys, train, "--resume", corpus=other)
    assert "belongs to another tokenizer" in said
    assert before[1]["tokenizer_fingerprint"] in said
    assert "the first id that differs is 13: 'a' there, 'E' here" in said
    assert tokenizer.read_bytes() == before[0]
    assert same(load(tmp_path / "run"), before[1])


def test_resume_without_a_checkpoint_or_with_a_bad_one(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "mini_gpt_latest.pt: no checkpoint to resume from" in refusal(capsys, train, "--resume")
    path = tmp_path / "run" / "checkpoints" / "mini_gpt_latest.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK\x03\x04 cut off")
    assert "mini_gpt_latest.pt: damaged or not a checkpoint" in refusal(capsys, train, "--resume")
    torch.save({"step": 3}, path)
    assert "lacks best_val_loss, config" in refusal(capsys, train, "--resume")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or folder"),
        (b"", "is empty"),
        (TEXT.encode() + "é".encode()[:1], "is cut off"),
        ("naïve ".encode("latin-1") * 100, "is not UTF-8"),
        (b"short", "one row takes 33"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    message = refusal(capsys, train, corpus=path)
    assert str(path) in message
    assert said in message
    assert not (tmp_path / "run").exists()


def test_a_folder_without_known_names_is_refused(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "folder"
    empty.mkdir()
    assert f"{empty}: no split under a known name" in refusal(capsys, train, corpus=empty)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dropout", "1"), "dropout is 1.0"),
        (("--steps", "0"), "0 is not a positive number"),
        (("--lr", "-1"), "-1 is not a positive number"),
        (("--break", "everything"), "invalid choice: 'everything'"),
    ],
)
def test_options_that_cannot_work_are_refused(
    train: Run, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert said in refusal(capsys, train, *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that the test does without")
def test_a_device_that_is_not_there_is_refused(train: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "this torch sees no CUDA device" in refusal(capsys, train, "--device", "cuda")


def test_a_folder_that_cannot_be_written_is_refused(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    assert "cannot be written to" in refusal(capsys, train, "--steps", "1")


def test_characters_that_only_validation_has_are_known(train: Run, tmp_path: Path) -> None:
    folder = tmp_path / "splits"
    folder.mkdir()
    for split, letter in (("train", "a"), ("valid", "é"), ("test", "日")):
        (folder / f"{split}.txt").write_text(f"{letter} b c\n" * 40, encoding="utf-8")
    script = train("--steps", "2", corpus=folder)
    assert {"a", "é", "日"} <= set(script["tokenizer"].chars)


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


def test_a_bad_corpus_ends_the_process_with_code_2(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--corpus", str(tmp_path / "none"), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr
