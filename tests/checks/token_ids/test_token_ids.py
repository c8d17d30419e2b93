"""Token ids: what wraps, leaves the range, repeats or leaks is said; real text of any make stays quiet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gpt_guard.checks.token_ids.copies as copies_module
import gpt_guard.checks.token_ids.ids as ids_module
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.token_ids.copies import overlap, repetition, window_hashes, window_length
from gpt_guard.checks.token_ids.ids import id_stats, runs
from gpt_guard.checks.token_ids.stage import TokenIdsStage
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.records import CheckResult, Severity
from mini_gpt import MiniGPT, MiniGPTConfig

from ..results import assert_caught, by_title, failed

CHARS = [chr(65 + index) for index in range(60)]
V = len(CHARS)


def text(count: int = 6000, seed: int = 1, vocab_size: int = V) -> Tensor:
    """Ids that follow each other as in a text, more or less: often the same pairs, never the same pages."""
    draw = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, vocab_size + 1)
    return torch.multinomial(weights, count, replacement=True, generator=draw)


def lines(stage: TokenIdsStage | None = None, **given: Any) -> dict[str, CheckResult]:
    defaults: dict[str, Any] = {"tokenizer": adapt(CHARS), "vocab_size": V, "block_size": 16}
    return by_title((stage or TokenIdsStage()).run(Subject(**{**defaults, **given})))


BPE: dict[str, Any] = {"tokenizer": None, "vocab_size": 50304, "block_size": 16}
HEALTHY: dict[str, dict[str, Any]] = {
    "int64": {"data": {"train": text(), "val": text(seed=2)}},
    "int32": {"data": {"train": text().int()}},
    "uint16": {"data": {"train": text().to(torch.uint16), "val": text(seed=2).to(torch.uint16)}},
    "uint8": {"data": {"train": text().to(torch.uint8)}},
    "rows": {"data": {"train": text(17 * 300).view(300, 17)}},
    "BPE of which most is unseen": {"data": {"train": text(vocab_size=9000), "val": text(seed=2)}, **BPE},
    "BPE in uint16": {"data": {"train": text(vocab_size=50257).to(torch.uint16)}, **BPE},
    "bytes with special tokens in the batch only": {
        "data": {"train": text(vocab_size=250).to(torch.uint8)},
        "tokenizer": None,
        "vocab_size": 320,
    },
    "two tokens": {
        "data": {"train": torch.randint(2, (5000,))},
        "tokenizer": adapt(["0", "1"]),
        "vocab_size": 2,
    },
    "rulers": {"data": {"train": torch.cat([text(), torch.full((200,), 7), text(seed=3)])}},
    "one long ruler": {"data": {"train": torch.cat([text(40000), torch.full((300,), 7), text(seed=3)])}},
    "padding that is declared": {
        "data": {"train": torch.cat([text(), torch.full((900,), 59), text(seed=3)])},
        "pad_id": 59,
    },
    "an end of text that only the model has": {
        "data": {"train": torch.cat([text(), torch.tensor([V])])},
        "vocab_size": V + 1,
        "eos_id": V,
    },
    "very short splits": {"data": {"train": text(40), "val": text(20, seed=2)}},
    "nothing else known": {"data": {"train": text()}, "tokenizer": None, "vocab_size": None, "block_size": None},
}


@pytest.mark.parametrize("given", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_data_pass(given: dict[str, Any]) -> None:
    results = lines(**given)
    assert failed(results) == {}
    assert [finding for result in results.values() for finding in result.findings] == []


BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "floats": ({"data": {"train": text().float()}}, "train: form", "GG632", "became floating point"),
    "another tensor": ({"data": {"train": torch.randn(500)}}, "train: form", "GG632", "another tensor"),
    "bool": ({"data": {"train": text() > 3}}, "train: form", "GG632", "another tensor"),
    "a batch dimension": ({"data": {"train": text()[None]}}, "train: form", "GG632", "leading dimension"),
    "one-hot": ({"data": {"train": torch.zeros(2, 9, V).long()}}, "train: form", "GG632", "one-hot"),
    "other rows": ({"data": {"train": text().view(-1, 100)}}, "train: form", "GG632", "cut into rows"),
    "too short": ({"data": {"train": text(16)}}, "train: form", "GG633", "share given"),
    "uint8 for BPE": (
        {"data": {"train": text(vocab_size=200).to(torch.uint8)}, **BPE},
        "train: form",
        "GG630",
        "uint16 is right",
    ),
    "uint16 for a large BPE": (
        {"data": {"train": text(vocab_size=60000).to(torch.uint16)}, **BPE, "vocab_size": 100277},
        "train: form",
        "GG630",
        "uint16 is right",
    ),
    "signed": ({"data": {"train": text().to(torch.int16)}, **BPE}, "train: form", "GG630", "signed type"),
    "more characters than uint8": (
        {
            "data": {"train": text().to(torch.uint8)},
            "tokenizer": adapt([chr(192 + i) for i in range(300)]),
            **{"vocab_size": 300},
        },
        "train: form",
        "GG630",
        "uint16 is right",
    ),
    "wrapped and cast back": (
        {"data": {"train": torch.arange(120000)[torch.randperm(120000)] % 65536}, **BPE, "vocab_size": 100277},
        "train: range",
        "GG630",
        "cast to a wide one",
    ),
    "from one": (
        {"data": {"train": torch.cat([text() + 1, torch.tensor([V, V])])}},
        "train: range",
        "GG631",
        "begin at 1",
    ),
    "token id = vocab_size": (
        {"data": {"train": torch.cat([text(), torch.tensor([V])])}},
        "train: range",
        "GG631",
        "special token",
    ),
    "another tokenizer": ({"data": {"train": text() * 3}}, "train: range", "GG631", "another tokenizer"),
    "another tokenizer, large model": (
        {"data": {"train": text(vocab_size=90)}, "vocab_size": 128},
        "train: range",
        "GG631",
        "special token",
    ),
    "a smaller model": ({"data": {"train": text()}, "vocab_size": 40}, "train: range", "GG631", "smaller vocab_size"),
    "labels in the inputs": (
        {"data": {"train": torch.where(text() == 3, -100, text())}},
        "train: range",
        "GG631",
        "targets only",
    ),
    "negative": ({"data": {"train": text() - 40}}, "train: range", "GG631", "signed type"),
    "not filled to its end": (
        {"data": {"train": torch.cat([text(), torch.zeros(2000).long()])}},
        "train: runs",
        "GG635",
        "not filled",
    ),
    "padded documents": (
        {
            "data": {
                "train": torch.cat([torch.cat([text(300, i), torch.full((300,), 9)]) for i in range(9)] + [text(9)])
            }
        },
        "train: runs",
        "GG635",
        "padded to a fixed length",
    ),
    "written twice": ({"data": {"train": text().repeat(2)}}, "train: repetition", "GG636", "ran twice"),
    "a pattern": ({"data": {"train": torch.arange(5001) % 50}}, "train: repetition", "GG636", "short pattern"),
    "zeros and ones": ({"data": {"train": torch.randint(2, (5000,))}}, "vocabulary used", "GG637", "attention mask"),
    "int64 read as int32": (
        {"data": {"train": text().view(torch.int32)}},
        "vocabulary used",
        "GG637",
        "read with another dtype",
    ),
    "val is train": ({"data": {"train": text(), "val": text()}}, "val in train", "GG638", "is the training data"),
    "val is a slice of train": (
        {"data": {"train": text(), "test": text()[4000:]}},
        "test in train",
        "GG638",
        "is the training data",
    ),
    "rows drawn from one text": (
        {"data": {"train": text(), "val": torch.cat([text()[1000:2000], text(900, 5)])}},
        "val in train",
        "GG638",
        "split at random",
    ),
}


@pytest.mark.parametrize(("given", "title", "code", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_planted_bugs_are_caught_where_they_are(given: dict[str, Any], title: str, code: str, cause: str) -> None:
    assert_caught(lines(**given), title, code, cause)


def test_the_first_bad_id_and_its_place_are_named() -> None:
    ids = text()
    ids[[123, 4000]] = V + 5
    found = lines(data={"train": ids})["train: range"].findings[0]
    assert f"2 of 6000 are outside, the first is {V + 5} at 123" in found.seen
    assert found.evidence["outside"] == 2


def test_the_table_decides_where_it_is_smaller_than_the_config_says() -> None:
    model = MiniGPT(MiniGPTConfig(V - 9, block_size=16, embedding_dim=8, num_heads=2))
    result = lines(data={"train": text()}, model=model)["train: range"]
    assert result.status == "failed"
    assert "token_embedding" in result.expected


def test_a_few_ids_without_a_token_are_a_warning() -> None:
    result = lines(data={"train": torch.cat([text(), torch.tensor([V, V + 1])])}, vocab_size=V + 4)["train: range"]
    assert result.status == "passed"
    assert [note.severity for note in result.findings] == [Severity.WARNING]


def test_a_little_overlap_is_said_and_does_not_fail() -> None:
    held_out = torch.cat([text()[1000:1400], text(4000, 5)])
    result = lines(data={"train": text(), "val": held_out})["val in train"]
    assert result.status == "passed"
    assert [(note.code, note.severity) for note in result.findings] == [("GG638", Severity.WARNING)]


def test_the_limits_can_be_set() -> None:
    data = {"train": text(), "val": torch.cat([text()[1000:1400], text(4000, 5)])}
    assert failed(lines(TokenIdsStage(max_overlap=0.01), data=data)) == {"val in train": "GG638"}
    assert "windows of 3 ids" in lines(TokenIdsStage(window=3), data=data)["val in train"].expected
    assert failed(lines(TokenIdsStage(window=3, max_overlap=1.1, max_repeated=0.01), data=data)) == {
        "train: repetition": "GG636"
    }


def test_facts_and_the_decoded_sample() -> None:
    results = lines(data={"train": text() % 50 + 3, "val": text(seed=2)})
    facts: dict[str, Any] = {}
    for result in results.values():
        facts |= result.facts
    assert facts["token_min"] == 0
    assert facts["token_max"] == 59
    assert results["vocabulary used"].facts["tokens_used"] == 50
    assert repr("".join(CHARS[i] for i in (text() % 50 + 3)[:10].tolist()))[:-1] in results["train decoded"].measured
    assert "no tokenizer" in lines(data={"train": text()}, tokenizer=None)["train decoded"].measured


def test_other_splits_are_checked_where_one_is_unusable() -> None:
    results = lines(data={"train": text().float(), "val": text()})
    assert failed(results) == {"train: form": "GG632"}
    assert results["val: range"].status == "passed"


def test_a_split_too_short_for_windows_is_not_judged() -> None:
    assert lines(data={"train": text(), "val": text()[:60]})["val in train"].status == "skipped"


def test_what_is_missing_is_said() -> None:
    assert "data=" in str(TokenIdsStage().missing(Subject()))
    assert TokenIdsStage().missing(Subject(data={"val": text()})) is None


@pytest.mark.parametrize("chunk", [7, 64, 10**6])
def test_figures_do_not_depend_on_the_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.cat([text(100), torch.full((40,), 5), text(100, 3), torch.full((20,), 6)])
    expected = [(run.start, run.length, run.id) for run in slow_runs(ids, 15)]
    monkeypatch.setattr(ids_module, "CHUNK", chunk)
    longest, long = runs(ids, 15)
    assert [tuple(run) for run in long] == expected
    assert longest.length == max(length for _, length, _ in expected)
    stats = id_stats(ids)
    assert (stats.low, stats.high, stats.distinct) == (int(ids.min()), int(ids.max()), ids.unique().numel())
    assert torch.equal(stats.counts, torch.bincount(ids, minlength=stats.counts.numel()))


def slow_runs(ids: Tensor, least: int) -> list[Any]:
    found, start = [], 0
    for index in range(1, ids.numel() + 1):
        if index == ids.numel() or ids[index] != ids[start]:
            if index - start >= least:
                found.append(ids_module.Run(start, index - start, int(ids[start])))
            start = index
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 13, 50, 225])
def test_windows_hash_the_same_exactly_where_they_are_the_same(n: int) -> None:
    ids = torch.randint(3, (2000,))
    hashes = window_hashes(ids, n)
    assert hashes.shape == (2000 - n + 1,)
    _, by_ids = torch.unique(ids.unfold(0, n, 1), dim=0, return_inverse=True)
    _, by_hash = torch.unique(hashes, return_inverse=True)
    assert torch.unique(torch.stack([by_ids, by_hash]), dim=1).size(1) == by_ids.unique().numel()
    assert by_ids.unique().numel() == by_hash.unique().numel()
    assert window_hashes(ids[: n - 1], n).numel() == 0


@pytest.mark.parametrize("chunk", [5, 10**6])
def test_overlap_and_repetition_are_counted_exactly(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "CHUNK", chunk)
    train, held_out = torch.randint(3, (300,)), torch.randint(3, (80,))
    known = {tuple(window) for window in train.unfold(0, 4, 1).tolist()}
    windows = [tuple(window) for window in held_out.unfold(0, 4, 1).tolist()]
    assert overlap(held_out, train, 4).share == pytest.approx(sum(w in known for w in windows) / len(windows))
    rows = [tuple(window) for window in train.unfold(0, 6, 1).tolist()]
    again = [any(rows[j] == row and abs(i - j) >= 6 for j in range(len(rows))) for i, row in enumerate(rows)]
    spread = [row for row in set(rows) if max(i for i, r in enumerate(rows) if r == row) - rows.index(row) >= 6]
    found = repetition(train, 6)
    assert found.share == pytest.approx(sum(row in spread for row in rows) / len(rows))
    assert found.share >= sum(again) / len(again)


def test_a_run_alone_is_no_repetition() -> None:
    ids = torch.cat([torch.arange(100), torch.full((20,), 7), torch.arange(200, 300)])
    assert repetition(ids, 15).share == 0.0


def test_anchors_stand_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "ANCHORS", 100)
    held_out = torch.cat([text(3000), text(3000, 9)])
    found = overlap(held_out, text(3000), 50)
    assert found.windows <= 100
    assert found.share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16], ids=str)
def test_very_long_data_are_sampled_where_copies_begin(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "MAX_IDS", 3000)
    results = lines(data={"train": text(20000).repeat(2).to(dtype), "val": text(20000)[-900:].to(dtype)})
    assert failed(results) == {"train: repetition": "GG636", "val in train": "GG638"}
    assert "in 3,000 of 40,000 ids" in results["train: repetition"].measured


def test_windows_are_longer_for_characters_than_for_words() -> None:
    assert window_length(10**6, 65) == 200
    assert window_length(10**6, 50257) == 50
    assert window_length(10**6, 0) == 50
    assert window_length(300, 65) == 75
