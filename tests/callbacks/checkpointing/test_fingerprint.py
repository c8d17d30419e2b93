from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_guard.callbacks.checkpointing.fingerprint import CheckpointFingerprint
from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.checkpoint.fingerprint import config_digest, file_digest, text_digest, tokenizer_digest, weights_digest
from gpt_guard.errors import FingerprintMismatch
from gpt_guard.guardian import Guardian
from gpt_guard.records import Moment, Severity
from mini_gpt import MiniGPT, MiniGPTConfig

CHARS = sorted("\n abcdefghijk")
CONFIG = MiniGPTConfig(vocab_size=len(CHARS), block_size=8, embedding_dim=16, num_heads=2, num_layers=1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def train(run_dir: Path | None, *guards: CheckpointFingerprint, steps: int = 2, **options: Any) -> Guardian:
    """A real loop under these guards alone."""
    model = MiniGPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with Guardian(model, optimizer, guards=guards, run_dir=run_dir, sinks=[], **options) as guardian:
        for _ in range(steps):
            ids = torch.randint(0, len(CHARS), (2, 9))
            optimizer.zero_grad()
            loss = model(ids[:, :-1], ids[:, 1:])[1]
            loss.backward()
            optimizer.step()
    return guardian


def stamp(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "fingerprint.json").read_text(encoding="utf-8"))
    return content


def test_a_run_leaves_its_fingerprint_and_the_next_one_agrees(run_dir: Path) -> None:
    for _ in range(2):
        guardian = train(run_dir, CheckpointFingerprint(CHARS, CONFIG, texts={"chat_template": "x"}))
        assert guardian.findings == ()
        assert guardian.step == 2
    wanted = {
        "tokenizer": tokenizer_digest(CHARS),
        "config": config_digest(CONFIG),
        "text:chat_template": text_digest("x"),
    }
    assert stamp(run_dir)["parts"] == wanted
    assert stamp(run_dir)["tokens"] == CHARS
    assert guardian.report().fingerprint == wanted


def test_another_tokenizer_halts_on_entry_and_the_first_character_is_named(run_dir: Path) -> None:
    train(run_dir, CheckpointFingerprint(CHARS))
    before = stamp(run_dir)
    guard = CheckpointFingerprint([*CHARS[:-1], "z"])
    with pytest.raises(FingerprintMismatch) as caught:
        train(run_dir, guard)
    finding = caught.value.finding
    assert (finding.code, finding.step, finding.moment, finding.guard) == ("GG701", 0, Moment.START, guard.name)
    assert "Id 12 is 'k' there and 'z' here" in finding.seen
    assert "run/fingerprint.json" in finding.seen
    assert stamp(run_dir) == before
    assert guard._watch is None


def test_another_config_halts_with_the_keys(run_dir: Path) -> None:
    train(run_dir, CheckpointFingerprint(config={"lr": 1e-3, "seed": 1}))
    with pytest.raises(FingerprintMismatch) as caught:
        train(run_dir, CheckpointFingerprint(config={"lr": 1e-2, "seed": 1}))
    assert caught.value.finding.code == "GG702"
    assert caught.value.finding.evidence["changes"] == {"lr": {"checkpoint": 1e-3, "now": 1e-2}}


def test_a_config_that_only_gained_a_key_is_no_other_config(run_dir: Path) -> None:
    train(run_dir, CheckpointFingerprint(config={"lr": 1e-3}))
    assert train(run_dir, CheckpointFingerprint(config={"lr": 1e-3, "seed": 1})).findings == ()
    assert stamp(run_dir)["config"] == {"lr": 1e-3, "seed": 1}


def test_a_data_file_that_changed_halts_by_name(run_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "train_ids.pt"
    data.write_bytes(b"one")
    train(run_dir, CheckpointFingerprint(data=[data]))
    assert stamp(run_dir)["parts"] == {"data:train_ids.pt": file_digest(data)}
    train(run_dir, CheckpointFingerprint(data=data))
    data.write_bytes(b"two")
    with pytest.raises(FingerprintMismatch, match=r"train_ids\.pt") as caught:
        train(run_dir, CheckpointFingerprint(data=[data]))
    assert caught.value.finding.code == "GG703"


def test_a_chat_template_that_changed_halts_by_name(run_dir: Path) -> None:
    train(run_dir, CheckpointFingerprint(texts={"chat_template": "{user}"}))
    with pytest.raises(FingerprintMismatch, match="chat_template"):
        train(run_dir, CheckpointFingerprint(texts={"chat_template": "{user} "}))


def test_the_policy_may_let_it_go_on_and_the_old_fingerprint_stays(run_dir: Path) -> None:
    train(run_dir, CheckpointFingerprint(CHARS, {"lr": 1}))
    guardian = train(run_dir, CheckpointFingerprint(CHARS[::-1], {"lr": 2}), policy={"GG7xx": "record"})
    assert [finding.code for finding in guardian.findings] == ["GG701", "GG702"]
    assert guardian.step == 2
    assert stamp(run_dir)["tokens"] == CHARS


def test_parts_of_several_runs_come_together(run_dir: Path) -> None:
    train(run_dir, CheckpointFingerprint(CHARS))
    train(run_dir, CheckpointFingerprint(config={"lr": 1}))
    train(run_dir, CheckpointFingerprint())
    assert set(stamp(run_dir)["parts"]) == {"tokenizer", "config"}
    assert stamp(run_dir)["tokens"] == CHARS


def test_without_a_folder_or_anything_to_name_nothing_is_written(run_dir: Path) -> None:
    assert train(None, CheckpointFingerprint(CHARS)).findings == ()
    assert train(run_dir, CheckpointFingerprint()).findings == ()
    assert not (run_dir / "fingerprint.json").exists()


def test_the_models_own_config_and_the_weights_are_noted_not_compared(run_dir: Path) -> None:
    torch.manual_seed(5)
    digest = weights_digest(MiniGPT(CONFIG))
    for seed in (5, 6):
        torch.manual_seed(seed)
        guardian = train(run_dir, CheckpointFingerprint(weights=True))
        assert guardian.findings == ()
        assert guardian.report().fingerprint["config"] == config_digest(CONFIG)
        assert (guardian.report().fingerprint["weights"] == digest) == (seed == 5)


def test_what_cannot_be_read_is_named_as_not_watched(run_dir: Path, tmp_path: Path) -> None:
    guard = CheckpointFingerprint(object(), CONFIG, data=[tmp_path / "gone.pt"])
    guardian = train(run_dir, guard)
    assert guardian.step == 2
    spots = "\n".join(guardian.report().not_watched)
    assert "gone.pt" in spots
    assert "shows no vocabulary" in spots
    assert set(stamp(run_dir)["parts"]) == {"config"}


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04", b'{"parts": 3}'])
def test_an_earlier_fingerprint_that_cannot_be_read_is_said_and_written_anew(run_dir: Path, content: bytes) -> None:
    run_dir.mkdir()
    (run_dir / "fingerprint.json").write_bytes(content)
    (finding,) = train(run_dir, CheckpointFingerprint(CHARS)).findings
    assert (finding.code, finding.severity) == ("GG707", Severity.WARNING)
    assert stamp(run_dir)["tokens"] == CHARS


def test_a_folder_that_cannot_be_written_does_not_stop_training(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpt_guard.callbacks.checkpointing.fingerprint.write_stamp", full)
    guardian = train(run_dir, CheckpointFingerprint(CHARS))
    assert guardian.step == 2
    assert guardian.findings == ()
    assert any("No space left" in spot for spot in guardian.report().not_watched)


def test_it_gives_a_checkpoint_what_it_needs_before_and_after_the_run(run_dir: Path, tmp_path: Path) -> None:
    guard = CheckpointFingerprint(CHARS, texts={"chat_template": "x"})
    assert set(guard.belongings["fingerprint"].parts) == {"text:chat_template"}
    train(run_dir, guard)
    model = MiniGPT(CONFIG)
    save_checkpoint(tmp_path / "a.pt", model, **guard.belongings)
    loaded = load_checkpoint(tmp_path / "a.pt", model, **CheckpointFingerprint(CHARS).belongings)
    assert set(loaded.verified) >= {"tokenizer", "config", "weights"}
    assert loaded.fingerprint["text:chat_template"] == text_digest("x")
    with pytest.raises(FingerprintMismatch):
        load_checkpoint(tmp_path / "a.pt", model, **CheckpointFingerprint(CHARS[::-1]).belongings)


def test_a_guarded_run_is_bit_identical_to_a_bare_one(run_dir: Path) -> None:
    digests = []
    for guards in ((), (CheckpointFingerprint(CHARS, CONFIG, weights=True),)):
        torch.manual_seed(3)
        model = MiniGPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        with Guardian(model, optimizer, guards=guards, run_dir=run_dir, sinks=[]):
            ids = torch.randint(0, len(CHARS), (2, 9))
            model(ids[:, :-1], ids[:, 1:])[1].backward()
            optimizer.step()
        digests.append((weights_digest(model), torch.get_rng_state().tolist()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_detaches_on_every_way_out(run_dir: Path, error: type[BaseException]) -> None:
    guard = CheckpointFingerprint(CHARS)
    model = MiniGPT(CONFIG)
    guardian = Guardian(model, guards=[guard], run_dir=run_dir, sinks=[])

    def fail() -> None:
        with guardian:
            assert guard.watch.model is model
            raise error

    with pytest.raises(error):
        fail()
    assert guard._watch is None
    assert guard.parts["tokenizer"] == tokenizer_digest(CHARS)
