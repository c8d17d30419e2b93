"""Loops, distinct n-grams, entropy, words and pairs: the figures by which a text is judged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpt_guard.checks.generation.corpus import Corpus, TokenPairs, bigram_loss
from gpt_guard.checks.generation.decoding import SETTINGS, Setting
from gpt_guard.checks.generation.text_quality import (
    CorpusBaseline,
    char_entropy,
    judge_loops,
    longest_loops,
    measure,
    unknown_words,
    words,
)

TEXT = "it was the best of times, it was the worst of times, and nobody could say which of them had come to stay. "


def ids(text: str) -> Tensor:
    return torch.tensor([[ord(char) for char in text]])


@pytest.mark.parametrize(
    ("text", "share", "period", "start"),
    [
        ("the the the the the ", 1.0, 4, 0),
        ("= = = = = = ", 1.0, 2, 0),
        ("--------", 1.0, 1, 0),
        ("ab------", 0.75, 1, 2),
        ("he said he said ", 0.0, 0, 0),
        ("abcdefghijkl", 0.0, 0, 0),
        ("xyabcabcabcq", 9 / 12, 3, 2),
    ],
)
def test_the_longest_loop(text: str, share: float, period: int, start: int) -> None:
    ((found, *where),) = longest_loops(ids(text))
    assert found == pytest.approx(share)
    assert where == [period, start]


def test_loops_agree_with_a_plain_search() -> None:
    def plain(row: list[int]) -> float:
        best = 0
        for period in range(1, len(row) // 3 + 1):
            run = 0
            for place in range(period, len(row)):
                run = run + 1 if row[place] == row[place - period] else 0
                if run >= 2 * period and run + period >= 6:
                    best = max(best, run + period)
        return best / len(row)

    rows = torch.randint(2, (50, 30))
    assert [share for share, _, _ in longest_loops(rows)] == pytest.approx([plain(row) for row in rows.tolist()])


def test_distinct_and_repeated_n_grams() -> None:
    (same,) = measure(ids("the the the the the "), n=4)
    assert same.distinct == pytest.approx(4 / 17)
    assert same.repeated == pytest.approx(13 / 17)
    (new,) = measure(ids("abcdefghijkl"))
    assert (new.distinct, new.repeated, new.loop) == (1.0, 0.0, 0.0)
    assert measure(ids("abc"))[0].repeated == 0.0


def baseline(text: str, length: int = 60) -> CorpusBaseline:
    seen = ids(text)[0]
    return CorpusBaseline(Corpus(seen, seen[: len(seen) // 4]), 128, length, None)


def test_the_corpus_sets_the_baseline() -> None:
    plain, rules = baseline(TEXT * 20, 80), baseline((TEXT + "-" * 60 + "\n") * 20, 80)
    assert plain.loop < 0.1 < 0.5 < rules.loop
    too_short = baseline("abc", 80)
    assert (too_short.loop, too_short.repeated) == (0.0, 0.0)


@pytest.mark.parametrize("loop", ["the ", "= ", "a statement is "])
def test_loops_count_against_plain_text_and_not_against_text_that_is_made_of_them(loop: str) -> None:
    row = ids((loop * 60)[:60])
    assert baseline(TEXT * 40).loops("greedy", row).loops
    assert not baseline(loop * 800).loops("greedy", row).loops


def test_loops_with_a_word_between_them_are_seen_by_their_n_grams() -> None:
    text = "".join(f"the cat sat on {word} the cat sat on " for word in ("a", "my", "it", "us"))
    row = ids(text)
    found = baseline(TEXT * 40, row.size(1)).loops("x", row)
    assert found.worst.loop < 0.5
    assert found.loops


def samples(looping: set[str]) -> list[tuple[Setting, Tensor]]:
    fresh = ids(TEXT[:60])
    return [(one, ids("= " * 30) if str(one) in looping else fresh) for one in SETTINGS]


@pytest.mark.parametrize(
    ("looping", "cause", "severity"),
    [
        ({str(one) for one in SETTINGS}, "The model", "error"),
        ({"greedy", "temperature 0.8, top_k 40", "temperature 1"}, "The model", "error"),
        ({"greedy", "temperature 0.8, top_k 40"}, "The setting", "warning"),
    ],
)
def test_who_is_at_fault(looping: set[str], cause: str, severity: str) -> None:
    measured = baseline(TEXT * 40)
    finding = judge_loops([measured.loops(one, rows) for one, rows in samples(looping)], "temperature 1")
    assert finding is not None
    assert (finding.code, finding.severity.value) == ("GG687", severity)
    assert finding.causes[0].startswith(cause)
    assert "61 32 61 32" in finding.seen  # without a tokenizer a text is its ids


def test_greedy_loops_alone_and_none_at_all_say_nothing() -> None:
    measured = baseline(TEXT * 40)
    for looping in (set(), {"greedy"}):
        assert judge_loops([measured.loops(one, rows) for one, rows in samples(looping)], "temperature 1") is None


def test_entropy_is_shannons() -> None:
    assert char_entropy("abcd" * 5) == pytest.approx(2.0)
    assert char_entropy("aaaa") == 0.0
    assert char_entropy("") == 0.0


def test_words_and_pairs_that_the_corpus_never_has() -> None:
    known = set(words(TEXT))
    assert unknown_words(TEXT * 2, known) == pytest.approx(0.0, abs=0.06)
    assert unknown_words(TEXT[::-1] * 2, known) == pytest.approx(0.9, abs=0.1)
    assert unknown_words("too few", known) is None
    pairs = TokenPairs(torch.tensor([0, 1, 2, 0, 1]), vocab_size=3)
    assert pairs.unseen(torch.tensor([[0, 1, 2], [1, 0, 2]])) == pytest.approx(0.5)
    assert pairs.unseen(torch.tensor([[0]])) is None


def test_a_bigram_model_knows_pairs_and_no_more() -> None:
    cycle = torch.arange(4).repeat(500)
    assert bigram_loss(Corpus(cycle, cycle[:400]), 4) < 0.02
    noise = torch.randint(4, (8000,))
    assert bigram_loss(Corpus(noise[:6000], noise[6000:]), 4) == pytest.approx(math.log(4), abs=0.02)
