from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.checkpoint.fingerprint import Fingerprint, tokenizer_digest
from gpt_guard.errors import CheckpointError, FingerprintMismatch
from gpt_guard.records import Finding
from mini_gpt import MiniGPT

CHARS = sorted("\n abcdefghijk")
Build = Callable[..., MiniGPT]


@pytest.fixture
def saved(path: Path, build: Build) -> Path:
    return save_checkpoint(path, build(dropout=0.1), tokenizer=CHARS)


@pytest.mark.parametrize(
    ("tokens", "there", "here", "cause"),
    [
        ([*CHARS[:3], "c", "b", *CHARS[5:]], "Id 3 is 'b' there", "'c' here", "order"),
        (["\n", " ", *"abcdefghijz"], "Id 12 is 'k' there", "'z' here", "rebuilt from another text"),
        ([*CHARS, "é"], "Id 13 is no token there", r"'\\xe9' here (13 tokens there, 14 here)", "added at the end"),
        (CHARS[:-1], "Id 12 is 'k' there", "no token here", "added at the end"),
    ],
)
def test_another_tokenizer_is_named_to_the_first_character(
    saved: Path, build: Build, untouched: Any, tokens: list[str], there: str, here: str, cause: str
) -> None:
    model = build(1, dropout=0.1)
    before = untouched(model)
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(saved, model, tokenizer=SimpleNamespace(chars=tokens))
    finding = caught.value.finding
    assert isinstance(caught.value, ValueError)
    assert finding.code == "GG701"
    assert there in finding.seen
    assert here.replace("\\\\", "\\") in finding.seen
    assert cause in finding.causes[0]
    assert finding.evidence["checkpoint"] == tokenizer_digest(CHARS)
    assert finding.evidence["now"] == tokenizer_digest(tokens)
    assert str(finding.evidence["checkpoint"])[:12] in finding.seen
    before.check()


def test_without_the_tokens_the_digests_are_named(path: Path, build: Build) -> None:
    torch.save({"model": build().state_dict(), "tokenizer_fingerprint": tokenizer_digest(CHARS)}, path)
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(path, build(), tokenizer=CHARS[:-1])
    assert tokenizer_digest(CHARS)[:12] in caught.value.finding.seen
    assert "Id" not in caught.value.finding.seen
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(path, build(), tokenizer=CHARS[::-1])
    # Not in the error's own text, which is wrapped at a place that depends on how long the path is.
    assert "same tokens in sorted order" in caught.value.finding.seen


def test_tokens_that_are_not_those_of_the_digest_are_not_shown(path: Path, build: Build) -> None:
    save_checkpoint(path, build(), tokenizer=CHARS)
    content = torch.load(path)
    torch.save({**content, "tokenizer_chars": ["x"]}, path)
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(path, build(), tokenizer=CHARS[:-1])
    assert "'x'" not in caught.value.finding.seen


def test_another_config_is_named_by_key_old_and_new(saved: Path, build: Build, untouched: Any) -> None:
    model = build(1, num_heads=4, dropout=0.3)  # the number of heads changes no shape
    before = untouched(model)
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(saved, model, tokenizer=CHARS)
    assert caught.value.finding.code == "GG702"
    assert "dropout was 0.1, is 0.3; num_heads was 2, is 4" in caught.value.finding.seen
    before.check()
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(saved, model, tokenizer=CHARS, ignore_config=["dropout"])
    assert "dropout" not in caught.value.finding.seen
    load_checkpoint(saved, model, tokenizer=CHARS, ignore_config=["dropout", "num_heads"])


def test_a_config_that_was_given_is_compared_and_a_new_key_is_no_difference(path: Path, build: Build) -> None:
    save_checkpoint(path, build(), config={"lr": 1e-3, "steps": 10})
    assert "config" in load_checkpoint(path, build(), config={"steps": 10, "lr": 0.001, "new": True}).verified
    with pytest.raises(FingerprintMismatch, match=r"lr was 0.001, is 0.01"):
        load_checkpoint(path, build(), config={"lr": 1e-2})


def test_data_and_texts_that_changed_are_named(path: Path, build: Build, tmp_path: Path) -> None:
    data = tmp_path / "train_ids.pt"
    data.write_bytes(b"old")
    old = Fingerprint.of(data=[data], texts={"chat_template": "old"})
    save_checkpoint(path, build(), fingerprint=old)
    data.write_bytes(b"new")
    with pytest.raises(FingerprintMismatch, match="data file train_ids") as caught:
        load_checkpoint(path, build(), fingerprint=Fingerprint.of(data=[data]))
    assert caught.value.finding.code == "GG703"
    assert "made again" in caught.value.finding.causes[0]
    with pytest.raises(FingerprintMismatch, match="text chat_template") as caught:
        load_checkpoint(path, build(), fingerprint=Fingerprint.of(texts={"chat_template": "old "}))
    assert "edited" in caught.value.finding.causes[0]


def test_a_flipped_bit_is_seen(saved: Path, build: Build) -> None:
    content = bytearray(saved.read_bytes())
    raw = build(dropout=0.1).state_dict()["head.weight"].numpy().tobytes()
    place = content.find(raw)
    assert place > 0
    content[place + 2] ^= 1
    saved.write_bytes(content)
    with pytest.raises(FingerprintMismatch) as caught:
        load_checkpoint(saved, build(dropout=0.1), tokenizer=CHARS)
    assert caught.value.finding.code == "GG703"
    assert caught.value.finding.seen.startswith("weights in ")
    assert "bytes changed" in caught.value.finding.causes[0]


def test_optimizer_state_of_another_file_is_seen(path: Path, build: Build, train: Any) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    content = torch.load(path)
    content["optimizer_state_dict"]["state"][0]["exp_avg"] += 1
    torch.save(content, path)
    with pytest.raises(FingerprintMismatch, match="optimizer in"):
        load_checkpoint(path, model)


def test_the_caller_decides_about_mismatches(saved: Path, build: Build, reported: list[Finding]) -> None:
    model = build(1, dropout=0.5)
    loaded = load_checkpoint(saved, model, tokenizer=CHARS[::-1], on_finding=reported.append)
    assert [finding.code for finding in reported] == ["GG701", "GG702"]
    assert loaded.findings == tuple(reported)
    assert loaded.verified == ("weights",)
    assert torch.equal(model.head.weight, build(dropout=0.1).head.weight)


def test_what_cannot_be_loaded_raises_whatever_the_caller_decides(
    saved: Path, build: Build, reported: list[Finding], untouched: Any
) -> None:
    model = build(num_layers=3)
    before = untouched(model)
    with pytest.raises(CheckpointError):
        load_checkpoint(saved, model, on_finding=reported.append, ignore_config=["num_layers", "dropout"])
    assert [finding.code for finding in reported] == ["GG705"]
    before.check()
