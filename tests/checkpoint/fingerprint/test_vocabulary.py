from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt_guard.checkpoint.fingerprint import token_list, tokenizer_digest
from gpt_guard.errors import GuardUsageError

CHARS = ["\n", " ", "a", "b", "é", "漢"]
EXPECTED = hashlib.sha256(json.dumps(CHARS, ensure_ascii=False, separators=(",", ":")).encode("utf-8")).hexdigest()
TO_ID = {char: index for index, char in enumerate(CHARS)}
TO_CHAR = dict(enumerate(CHARS))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "char_tokenizer.json"


@pytest.mark.parametrize(
    "tokenizer",
    [
        CHARS,
        tuple(CHARS),
        {"chars": CHARS},
        {"chars": CHARS, "version": 1},
        SimpleNamespace(chars=CHARS),
        SimpleNamespace(chars="".join(CHARS)),
        SimpleNamespace(get_vocab=lambda: dict(reversed(TO_ID.items()))),
        SimpleNamespace(stoi=TO_ID, itos=TO_CHAR),
        SimpleNamespace(itos=TO_CHAR),
        SimpleNamespace(itos=CHARS),
        SimpleNamespace(vocab=TO_ID),
        SimpleNamespace(vocab=CHARS),
        SimpleNamespace(id_to_piece=CHARS.__getitem__, get_piece_size=lambda: len(CHARS)),
        {"model": {"vocab": TO_ID, "merges": []}},
        TO_ID,
        {"itos": TO_CHAR},
    ],
)
def test_every_way_to_hold_the_same_tokens_has_the_digest_of_existing_checkpoints(tokenizer: Any) -> None:
    assert tokenizer_digest(tokenizer) == EXPECTED
    assert token_list(tokenizer) == CHARS


def test_a_file_has_it_too(path: Path) -> None:
    path.write_text(json.dumps({"chars": CHARS}), encoding="utf-8")
    assert tokenizer_digest(path) == tokenizer_digest(str(path)) == EXPECTED
    path.write_text(json.dumps(CHARS, ensure_ascii=False), encoding="utf-8")
    assert tokenizer_digest(path) == EXPECTED


@pytest.mark.parametrize("other", [CHARS[::-1], CHARS[:-1], [*CHARS, "c"], ["\n", " ", "a", "b", "e", "漢"]])
def test_order_length_and_every_character_count(other: list[str]) -> None:
    assert tokenizer_digest(other) != EXPECTED


def test_tiktoken_keeps_byte_strings() -> None:
    encoding = SimpleNamespace(_mergeable_ranks={b"a": 0, b"\xff": 1}, _special_tokens={"<|end|>": 2})
    assert token_list(encoding) == ["a", "ÿ", "<|end|>"]


def test_gaps_between_ids_are_part_of_the_digest() -> None:
    assert token_list({"a": 0, "b": 2}) is None
    assert len({tokenizer_digest({"a": 0, "b": other}) for other in (1, 2, 3)}) == 3


def test_a_lone_surrogate_has_a_digest() -> None:
    assert tokenizer_digest(["\ud800"]) != tokenizer_digest(["\ud801"])


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (object(), "shows no vocabulary"),
        (SimpleNamespace(chars=None), "shows no vocabulary"),
        ({"size": 3.5}, "this mapping is no vocabulary.*'size'"),
        ({"chars": ["a", 3]}, "number 1 is 3"),
        ("no/such/file.json", "cannot read the tokenizer file no/such/file.json"),
    ],
)
def test_what_is_no_tokenizer_is_said(tokenizer: Any, words: str) -> None:
    with pytest.raises(GuardUsageError, match=words):
        tokenizer_digest(tokenizer)


@pytest.mark.parametrize("content", [b"", b'{"chars": ["a"', b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(GuardUsageError, match=r"char_tokenizer.json holds no JSON"):
        tokenizer_digest(path)


def test_a_file_of_any_size_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_guard.checkpoint.fingerprint.vocabulary.MAX_TOKENIZER_BYTES", 10)
    path.write_text(json.dumps(CHARS))
    with pytest.raises(GuardUsageError, match="larger than 10 bytes"):
        tokenizer_digest(path)
