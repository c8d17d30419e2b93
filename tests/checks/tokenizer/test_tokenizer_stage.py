"""The tokenizer's stage: what is lost, doubled, invisible or foreign is said; what is meant stays quiet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.checkpoint.fingerprint import tokenizer_digest
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.tokenizer.stage import TokenizerStage, invisible
from gpt_guard.checks.tokenizer.tokenizers import adapt, special_ids
from gpt_guard.checks.tokenizer.vocabulary import model_rows, special_id, token_embedding
from gpt_guard.records import CheckResult, Severity
from mini_gpt import MiniGPT, MiniGPTConfig

from ..results import assert_caught, by_title, failed

TEXT = "The cat sat.\nÉlan! A\tday, 12 times over; who knows?\n"
CHARS = sorted(set(TEXT))


class Own:
    """A tokenizer as people write it."""

    def __init__(self, chars: Sequence[str] = CHARS) -> None:
        self.chars = list(chars)
        self.stoi = {char: index for index, char in enumerate(self.chars)}

    def encode(self, text: str) -> list[int]:
        return [self.stoi[char] for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.chars[index] for index in ids)


class Drops(Own):
    def encode(self, text: str) -> list[int]:
        return [self.stoi[char] for char in text if char in self.stoi]


class Replaces(Own):
    def encode(self, text: str) -> list[int]:
        return [self.stoi.get(char, self.stoi["?"]) for char in text]


class Lowers(Own):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


class ShiftedByOne(Own):
    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([index - 1 for index in ids])


class Joins(Own):
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.chars[index] for index in ids)


class AddsEnds(Own):
    def encode(self, text: str) -> list[int]:
        return [0, *super().encode(text), 0]


class DecodesFewer(Own):
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.chars[: len(self.chars) // 2][index] for index in ids)


class Declared(Own):
    """Unknown characters have a token of their own."""

    def __init__(self) -> None:
        super().__init__([*CHARS, "<unk>"])

    def encode(self, text: str) -> list[int]:
        return [self.stoi.get(char, len(CHARS)) for char in text]


class Sign(Own):
    """The same with a sign that a text could contain, and an attribute that says so."""

    unk_token = "\u25a1"

    def __init__(self) -> None:
        super().__init__([*CHARS, self.unk_token])

    def encode(self, text: str) -> list[int]:
        return [self.stoi.get(char, len(CHARS)) for char in text]


class Bytes:
    """UTF-8, strict: half a character cannot be decoded; 256 ends a text."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


class ReplacingBytes(Bytes):
    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words:
    """Splits at blanks, and joins by one."""

    def __init__(self) -> None:
        self.itos = sorted(set(TEXT.split()))
        self.stoi = {word: index for index, word in enumerate(self.itos)}

    def encode(self, text: str) -> list[int]:
        return [self.stoi[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.itos[index] for index in ids)


def lines(raw: Any, **given: Any) -> dict[str, CheckResult]:
    return by_title(TokenizerStage().run(Subject(tokenizer=adapt(raw), **given)))


def data(raw: Any, times: int = 60) -> dict[str, torch.Tensor]:
    return {"train": torch.tensor(raw.encode(TEXT * times))}


HEALTHY = [CHARS, {"chars": CHARS}, Own(), Declared(), Sign(), Bytes(), ReplacingBytes(), Words()]


@pytest.mark.parametrize("raw", HEALTHY, ids=lambda raw: type(raw).__name__)
def test_healthy_tokenizers_pass(raw: Any) -> None:
    results = lines(raw, data=data(adapt(raw)))
    assert failed(results) == {}
    assert [finding for result in results.values() for finding in result.findings] == []
    assert results["round trip of train data"].status == "passed"


@pytest.mark.parametrize("raw", HEALTHY[:-1], ids=lambda raw: type(raw).__name__)
def test_a_text_of_ones_own_goes_round_unknown_characters_aside(raw: Any) -> None:
    result = lines(raw, text=TEXT + "ж")["round trip"]
    assert result.status == "passed"
    assert ("without 1 characters" in result.measured) == bool(adapt(raw).tokens)


def test_refusing_a_text_is_no_damage() -> None:
    assert "refused (KeyError)" in lines(Words(), text="unseen words")["round trip"].measured
    assert failed(lines(Words(), text="unseen words")) == {}


@pytest.mark.parametrize(
    ("raw", "title", "code", "cause"),
    [
        (Drops(), "unknown character", "GG622", "leaves it out"),
        (Replaces(), "unknown character", "GG622", "id of another token"),
        (Lowers([*CHARS, "é"]), "round trip", "GG621", "lower case"),
        (ShiftedByOne(), "round trip", "GG621", "same table"),
        (Joins(), "round trip", "GG621", "joins tokens with blanks"),
        (AddsEnds(), "round trip", "GG621", "adds tokens"),
        (DecodesFewer(), "round trip", "GG621", "raises"),
        ([*CHARS, "a"], "distinct", "GG620", "set(text)"),
        ([*CHARS, "<pad>", "<pad>"], "distinct", "GG620", "special token"),
        (["a"], "size", "GG625", "empty text"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_planted_bugs_are_caught_where_they_are(raw: Any, title: str, code: str, cause: str) -> None:
    results = lines(raw)
    assert_caught(results, title, code, cause)
    assert results[title].measured


@pytest.mark.parametrize("raw", [ShiftedByOne(), Joins(), DecodesFewer()], ids=lambda raw: type(raw).__name__)
def test_decoded_data_shows_it_too(raw: Any) -> None:
    assert failed(lines(raw, data=data(raw)))["round trip of train data"] == "GG621"


def test_what_differs_is_shown() -> None:
    found = lines(Lowers([*CHARS, "é"]))["round trip"].findings[0]
    assert "?ATac" in found.seen
    assert "?atac" in found.seen
    found = lines([*CHARS, "a"])["distinct"].findings[0]
    assert f"'a' at ids {CHARS.index('a')}, {len(CHARS)}" in found.seen


def test_a_lone_surrogate_can_be_reported() -> None:
    class Surrogates(Own):
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).replace("a", "\ud800")

    for raw in (Surrogates(), [*CHARS, "\ud800", "\ud800"]):
        results = lines(raw)
        assert failed(results)
        assert all(result.model_dump_json() for result in results.values())


def test_data_that_no_token_stands_for_is_not_the_tokenizers_fault() -> None:
    results = lines(CHARS, data={"train": torch.tensor([1, 2, 500, -1, 3])})
    assert failed(results) == {}
    assert lines(CHARS, data={"train": torch.tensor([500])})["round trip of train data"].status == "skipped"
    assert lines(CHARS, data={"train": torch.rand(9)})["round trip of train data"].status == "skipped"


def test_special_ids_are_left_out_of_decoded_data() -> None:
    ids = torch.tensor([*Bytes().encode(TEXT), 256, *Bytes().encode(TEXT)])
    assert failed(lines(Bytes(), data={"train": ids})) == {}
    assert special_ids(adapt(Bytes())) == {256}


def test_both_ends_and_invisible_characters_are_shown_escaped() -> None:
    chars = sorted(["\ufeff", "\r", "\u200b", "\u00a0", "\u0301", "\n", *"abc"])
    results = lines(chars)
    assert failed(results) == {}
    assert results["both ends"].measured.startswith("'\\n', '\\r', 'a'")
    assert "'\\ufeff' byte order mark (id 8)" in results["invisible characters"].measured
    (note,) = results["invisible characters"].findings
    assert (note.code, note.severity) == ("GG623", Severity.INFO)
    assert "carriage return" in note.causes[0]
    assert {one.name for one in invisible(chars)} >= {"no-break space", "combining acute accent", "zero width space"}


def test_accents_and_narrow_blanks_alone_are_no_finding() -> None:
    result = lines([*CHARS, "\u0301", "\u00a0", "\u200d"])["invisible characters"]
    assert "combining acute accent" in result.measured
    assert result.findings == ()
    assert lines(CHARS)["invisible characters"].measured == "none"
    assert [one.cause for one in invisible("\x00\ufffd\x85\u2028\u202e")] == [
        "control",
        "damaged",
        "control",
        None,
        "zero_width",
    ]


@pytest.mark.parametrize(
    ("rows", "code"),
    [(len(CHARS), None), (len(CHARS) + 1, None), (-(-len(CHARS) // 64) * 64, None), (50257, "note")],
)
def test_a_model_with_more_rows_is_fine_and_said_where_it_is_odd(rows: int, code: str | None) -> None:
    results = lines(CHARS, vocab_size=rows, sources={"vocab_size": "config.vocab_size"})
    assert failed(results) == {}
    notes = results["against the model"].findings
    assert [note.code for note in notes] == (["GG626"] if code else [])


def test_a_model_with_fewer_rows_fails_by_config_and_by_table() -> None:
    by_config = lines(CHARS, vocab_size=len(CHARS) - 1)
    assert failed(by_config) == {"against the model": "GG624"}
    model = MiniGPT(MiniGPTConfig(len(CHARS) - 3, block_size=4, embedding_dim=8, num_heads=2))
    results = lines(CHARS, model=model, vocab_size=len(CHARS), sources={"vocab_size": "config.vocab_size"})
    assert "token_embedding" in results["against the model"].findings[0].seen
    assert "against the model" not in lines(CHARS, vocab_size=5, sources={"vocab_size": "the tokenizer"})


def payload(**entries: Any) -> dict[str, Any]:
    return {"model_state_dict": {"w": torch.zeros(1)}, **entries}


def test_the_fingerprint_is_a_fact_and_is_compared_with_the_checkpoints() -> None:
    digest = tokenizer_digest(CHARS)
    result = lines(CHARS)["fingerprint"]
    assert result.facts == {"tokenizer_fingerprint": digest}
    for entries in (
        {"tokenizer_fingerprint": digest},
        {"tokenizer_fingerprint": digest, "tokenizer_chars": CHARS},
        {"chars": CHARS},
        {"stoi": {char: index for index, char in enumerate(CHARS)}},
        {"fingerprint": {"tokenizer": digest}},
        {"tokenizer_fingerprint": sha256(json.dumps(CHARS).encode()).hexdigest()},
        {"tokenizer_fingerprint": "my tokenizer, version 3"},
        {},
    ):
        assert failed(lines(CHARS, payload=payload(**entries))) == {}, entries


def test_the_digest_of_the_file_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"chars": CHARS}), encoding="utf-8")
    given = payload(tokenizer_fingerprint=sha256(path.read_bytes()).hexdigest())
    assert failed(lines(CHARS, payload=given, paths={"tokenizer": path})) == {}


def test_another_tokenizer_of_the_same_size_is_told_from_the_checkpoints() -> None:
    other = [*CHARS[:5], CHARS[6], CHARS[5], *CHARS[7:]]
    for entries in ({"chars": other}, {"tokenizer_fingerprint": tokenizer_digest(other), "tokenizer_chars": other}):
        results = lines(CHARS, payload=payload(**entries))
        assert failed(results) == {"fingerprint": "GG701"}
        found = results["fingerprint"].findings[0]
        assert found.evidence["first_differing_id"] == 5
        assert (found.evidence["token_checkpoint"], found.evidence["token_now"]) == (CHARS[6], CHARS[5])
        assert "unordered set" in found.causes[0]


def test_without_a_list_the_digest_alone_decides() -> None:
    results = lines(CHARS, payload=payload(tokenizer_fingerprint=tokenizer_digest(["x", "y"])))
    assert failed(results) == {"fingerprint": "GG701"}


def test_a_checkpoint_that_is_none_is_left_to_its_own_stage() -> None:
    assert failed(lines(CHARS, payload={"nothing": 1})) == {}


def test_what_is_missing_is_said() -> None:
    assert "no tokenizer" in str(TokenizerStage().missing(Subject()))
    assert TokenizerStage().missing(Subject(tokenizer=adapt(CHARS))) is None


def test_the_table_that_takes_ids_is_found_or_not() -> None:
    model = MiniGPT(MiniGPTConfig(9, block_size=4, embedding_dim=8, num_heads=2))
    found = token_embedding(model)
    assert found is not None
    assert found[0] == "token_embedding"
    assert token_embedding(nn.Sequential(nn.Embedding(3, 2), nn.Embedding(4, 2))) is None
    assert token_embedding(None) is None
    assert model_rows(Subject(model=model, vocab_size=12)) == (9, "token_embedding has 9 rows")


def test_special_ids_are_believed_only_where_they_can_be_meant() -> None:
    config = {"eos_token_id": 2, "pad_token_id": 0}
    told = special_id(Subject(config=config, vocab_size=9), "eos")
    assert told is not None
    assert (told.id, told.declared) == (2, False)
    assert special_id(Subject(config=config, vocab_size=9, tokenizer=adapt(list("abcdefghi"))), "eos") is None
    assert special_id(Subject(config={"eos_token_id": 50256}, vocab_size=9), "eos") is None
    named = special_id(Subject(tokenizer=adapt([*"abc", "<eos>", "<pad>"])), "pad")
    assert named is not None
    assert (named.id, named.declared) == (4, True)
    assert special_id(Subject(pad_id=1), "pad") == (1, "pad_id", True)
    table = special_id(Subject(model=nn.Sequential(nn.Embedding(5, 2, padding_idx=3))), "pad")
    assert table is not None
    assert table.id == 3


@pytest.fixture
def trained() -> Any:
    """A function that trains a BPE tokenizer of the library, by bytes or by characters."""
    library = pytest.importorskip("tokenizers")

    def train(by_bytes: bool, **model: Any) -> Any:
        made = library.Tokenizer(library.models.BPE(**model))
        alphabet = []
        if by_bytes:
            made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = library.decoders.ByteLevel()
            alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>", *model.values()]
        trainer = library.trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator([TEXT], trainer)
        return made

    return train


def test_a_byte_level_tokenizer_of_the_library_passes(trained: Any) -> None:
    raw = trained(by_bytes=True)
    results = lines(raw, text=TEXT + "ж\u0301", data=data(adapt(raw)))
    assert failed(results) == {}
    assert [finding for result in results.values() for finding in result.findings] == []
    assert "without loss" in results["unknown character"].measured


def test_one_that_drops_what_it_does_not_know_fails_unless_it_has_a_token_for_it(trained: Any) -> None:
    results = lines(trained(by_bytes=False))
    assert failed(results) == {"unknown character": "GG622"}
    assert "without byte fallback" in results["unknown character"].findings[0].causes[0]
    assert failed(lines(trained(by_bytes=False, unk_token="<unk>"))) == {}


def test_what_a_library_documents_is_no_error(trained: Any) -> None:
    raw = trained(by_bytes=False, unk_token="<unk>")
    notes = lines(raw, text=TEXT[::-1])["round trip"].findings
    assert [(note.code, note.severity) for note in notes] == [("GG621", Severity.INFO)]
    assert "joins tokens with blanks" in notes[0].causes[0]
