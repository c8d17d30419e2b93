"""How a text repeats itself, and how far it is from the corpus in its words, pairs and characters: figures, judged.

Distinct-n: Li et al. 2016 (A Diversity-Promoting Objective Function for Neural Conversation Models). Loops as the mark
of degenerate decoding, and human text as the yardstick: Holtzman et al. 2020 (The Curious Case of Neural Text
Degeneration). The share of repeated n-grams is that of Welleck et al. 2020 (seq-rep-n).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.corpus import Corpus, TokenPairs, bigram_text, windows
from gpt_guard.checks.generation.decoding import Setting
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer
from gpt_guard.records import Finding, Severity

N = 4
"""Length of the n-grams: that of Welleck et al. 2020."""
SHARE = 0.75
"""A setting loops where this share of its samples does."""
SHOWN = 60
_WORD = re.compile(r"[^\W\d_]+")
_FEWEST_WORDS = 20


@dataclass(frozen=True)
class Repetition:
    """The figures of one text.

    `distinct` and `repeated` are the shares of n-grams that are new and that stood in it before, `loop` that of the
    longest stretch that repeats one period, `period` its length in tokens.
    """

    distinct: float
    repeated: float
    loop: float
    period: int
    start: int = 0


def measure(rows: Tensor, n: int = N) -> list[Repetition]:
    """The figures of each row of ids `[B, T]`; those of a row shorter than n + 1 are of a text that repeats nothing."""
    length = rows.size(1)
    if length <= n:
        return [Repetition(1.0, 0.0, 0.0, 0)] * rows.size(0)
    loops = longest_loops(rows)
    found = []
    for row, (share, period, start) in zip(rows.tolist(), loops, strict=True):
        grams = {tuple(row[i : i + n]) for i in range(length - n + 1)}
        distinct = len(grams) / (length - n + 1)
        found.append(Repetition(distinct, 1.0 - distinct, share, period, start))
    return found


def longest_loops(rows: Tensor) -> list[tuple[float, int, int]]:
    """Share, period and start of the longest stretch of each row in which every id equals the one a period before it.

    A stretch counts from three rounds on, and from 6 ids on: two rounds are a phrase that was used twice.
    """
    count, length = rows.shape
    best = torch.zeros(count, 3, dtype=torch.long)
    for period in range(1, length // 3 + 1):
        equal = rows[:, period:] == rows[:, :-period]
        # Few rows have so many equal ids at a distance; only in those the longest run is looked for, which takes time.
        likely = (equal.sum(dim=1) >= max(2 * period, 6 - period, 1)).nonzero()[:, 0]
        if len(likely) == 0:
            continue
        runs, starts = _longest_runs(equal[likely])
        stretch = runs + period
        better = (runs >= 2 * period) & (stretch >= 6) & (stretch > best[likely, 0])
        found = torch.stack([stretch, torch.full_like(stretch, period), starts], dim=1)
        best[likely[better]] = found[better]
    return [(stretch / length, period, start) for stretch, period, start in best.tolist()]


def _longest_runs(equal: Tensor) -> tuple[Tensor, Tensor]:
    """Length and start of the longest run of True in each row: the distance to the last False before it."""
    place = torch.arange(1, equal.size(1) + 1).expand(equal.shape)
    last_false = torch.where(equal, 0, place).cummax(dim=1).values
    runs, ends = (place - last_false).max(dim=1)
    return runs, ends - runs + 1


def char_entropy(text: str) -> float:
    """Bits per character, by the frequencies of the characters in the text; 0 for an empty one."""
    counts, total = Counter(text), len(text)
    return -sum(c / total * math.log2(c / total) for c in counts.values()) if total else 0.0


def words(text: str) -> list[str]:
    """The runs of letters in a text, in lower case, without the first and last one, which may be cut."""
    return [word.lower() for word in _WORD.findall(text)][1:-1]


def unknown_words(text: str, known: set[str]) -> float | None:
    """The share of words that are not known; None where there are too few to tell."""
    found = words(text)
    return sum(word not in known for word in found) / len(found) if len(found) >= _FEWEST_WORDS else None


@dataclass(frozen=True)
class Loops:
    """How a setting's samples repeat: the median figures, the share of samples that loop, and the worst of them."""

    setting: str
    looping: float
    median: Repetition
    worst: Repetition
    text: str

    @property
    def loops(self) -> bool:
        """Whether this setting counts as looping."""
        return self.looping >= SHARE


@dataclass(frozen=True)
class TextFigures:
    """Entropy in bits per character, and the shares of words and of pairs of tokens that the corpus never has."""

    entropy: float | None
    unknown_words: float | None
    unseen_pairs: float | None

    def __str__(self) -> str:
        parts = {"unseen pairs": self.unseen_pairs, "non-words": self.unknown_words}
        shown = [f"{share:.0%} {name}" for name, share in parts.items() if share is not None]
        return ", ".join(shown + ([f"{self.entropy:.2f} bits/char"] if self.entropy is not None else []))


class CorpusBaseline:
    """What the corpus itself reaches, in samples as long as those that are judged.

    Limits lie halfway between the corpus and the worst there is: a loop over the whole text, all words unknown, all
    characters equally frequent. `loop` is the longest one in it, `repeated` the 99th percentile of the share of n-grams
    that stood before, `bigram_text` what text by the corpus's own pairs reaches.
    """

    def __init__(self, text: Corpus, vocab_size: int, length: int, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self._text = text
        self._tokenizer = tokenizer
        found = measure(windows(text.seen, length))
        repeated = sorted(one.repeated for one in found) or [0.0]
        self.loop = max((one.loop for one in found), default=0.0)
        self.repeated = repeated[int(0.99 * (len(repeated) - 1))]
        self._pairs = TokenPairs(text.seen, vocab_size)
        self._known = set(words(self.decode(text.seen))) if tokenizer is not None else set()
        self.held_out = self.figures(windows(text.held_out, length, 8))
        self.bigram_text = self.figures(bigram_text(text.seen, length, 8, seed))

    def decode(self, ids: Tensor) -> str:
        """Text of 1-D ids; without a tokenizer the ids themselves."""
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return self._tokenizer.decode(ids.tolist())

    def figures(self, rows: Tensor) -> TextFigures:
        """The figures of rows `[B, T]` together."""
        text = "\n".join(self.decode(row) for row in rows) if self._tokenizer is not None else ""
        return TextFigures(
            char_entropy(text) if text else None,
            unknown_words(text, self._known) if self._known else None,
            self._pairs.unseen(rows),
        )

    @property
    def limits(self) -> TextFigures:
        """From where on text counts as chaos."""
        held, bigram = self.held_out, self.bigram_text
        top = torch.tensor(max(2, len(set(self.decode(self._text.held_out))))).float().log2().item()
        return TextFigures(
            _halfway(held.entropy, top),
            # Young models write babble that is not chaos: words must be fewer than the corpus's pairs alone give.
            _halfway(max(held.unknown_words, bigram.unknown_words), 1.0)
            if held.unknown_words is not None and bigram.unknown_words is not None
            else None,
            _halfway(held.unseen_pairs, 1.0),
        )

    def loops(self, setting: Setting | str, rows: Tensor) -> Loops:
        """How the samples `[B, T]` of one setting repeat."""
        found = measure(rows)
        limit, repeated = self.loop_limit, self.repeated_limit
        looping = [one.loop > limit or one.repeated > repeated for one in found]
        by_loop = sorted(range(len(found)), key=lambda i: (looping[i], found[i].loop, found[i].repeated))
        worst, middle = by_loop[-1], by_loop[len(found) // 2]
        start = found[worst].start
        return Loops(
            str(setting),
            sum(looping) / len(looping),
            found[middle],
            found[worst],
            self.decode(rows[worst, start : start + SHOWN])[:SHOWN],
        )

    @property
    def loop_limit(self) -> float:
        """Share of a sample that one loop may take."""
        return (self.loop + 1) / 2

    @property
    def repeated_limit(self) -> float:
        """Share of 4-grams that may have stood in the sample before."""
        return (self.repeated + 1) / 2


def judge_loops(found: Sequence[Loops], own: str, *, copies: bool = False) -> Finding | None:
    """GG687: an error where the model's own distribution loops (the setting named `own`), else a warning for settings.

    `copies` tells that the model predicts the token it was just given: then that is the first cause. Greedy decoding
    alone says nothing: the likeliest path of healthy small models runs into loops, too.
    """
    looping = [one for one in found if one.loops]
    sampled = [one for one in looping if one.setting != "greedy"]
    if not sampled:
        return None
    by_name = {one.setting: one for one in found}
    is_model = by_name[own].loops if own in by_name else False
    named = "; ".join(f"{one.setting}: {one.looping:.0%} of the samples loop" for one in looping)
    worst = max(sampled, key=lambda one: (one.looping, one.worst.loop))
    seen = f"{named}. For example {worst.text!r} (period {worst.worst.period})"
    evidence: dict[str, Any] = {
        one.setting: {
            "looping": one.looping,
            "longest_loop": one.worst.loop,
            "distinct_4": one.median.distinct,
        }
        for one in found
    }
    if is_model:
        if len(looping) == len(found):
            seen = f"loops survive all {len(found)} settings: the model is at fault, not the decoding. {seen}"
        return finding(
            "GG687", seen, likely=["copying", "model"] if copies else ["model", "data", "overfit"], evidence=evidence
        )
    free = [one.setting for one in found if not one.loops]
    seen = f"{seen}. No loops with: {'; '.join(free)}"
    fix = f"Decode with {free[0] if free else own}."
    return finding("GG687", seen, likely=["decoding"], severity=Severity.WARNING, evidence=evidence, fix=fix)


def judge_chaos(
    sample: TextFigures, baseline: CorpusBaseline, setting: str, text: str, likely: Sequence[str]
) -> Finding | None:
    """GG688 where a sample is beyond any of the limits."""
    limits, held = baseline.limits, baseline.held_out
    beyond = {
        name: (value, limit)
        for name in ("unseen_pairs", "unknown_words", "entropy")
        if (value := getattr(sample, name)) is not None
        and (limit := getattr(limits, name)) is not None
        and value > limit
    }
    if not beyond:
        return None
    seen = f"{setting}: {sample}; held-out text has {held}. For example {text[:SHOWN]!r}"
    evidence: dict[str, Any] = {name: {"measured": value, "limit": limit} for name, (value, limit) in beyond.items()}
    return finding("GG688", seen, likely=likely, evidence=evidence)


def _halfway(value: float | None, worst: float) -> float | None:
    return (value + worst) / 2 if value is not None else None
