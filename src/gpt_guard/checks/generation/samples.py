"""Judge generated text against the corpus: loops under which settings, and how far from its words and pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.chaos import Pairs, char_entropy, unknown_words, words
from gpt_guard.checks.generation.decoding import Setting
from gpt_guard.checks.generation.learned import Corpus
from gpt_guard.checks.generation.repetition import Repetition, Usual, measure, usual, windows
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer
from gpt_guard.records import Finding, Severity

SHARE = 0.75
"""A setting loops where this share of its samples does."""
SHOWN = 60


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
class Figures:
    """Entropy in bits per character, and the shares of words and of pairs of tokens that the corpus never has."""

    entropy: float | None
    unknown_words: float | None
    unseen_pairs: float | None

    def __str__(self) -> str:
        parts = {"unseen pairs": self.unseen_pairs, "non-words": self.unknown_words}
        shown = [f"{share:.0%} {name}" for name, share in parts.items() if share is not None]
        return ", ".join(shown + ([f"{self.entropy:.2f} bits/char"] if self.entropy is not None else []))


class Yardstick:
    """What the corpus itself reaches, in samples as long as those that are judged.

    Limits lie halfway between the corpus and the worst there is: a loop over the whole text, all words unknown, all
    characters equally frequent. `bigram_words` is what babble by the corpus's own pairs reaches.
    """

    def __init__(self, text: Corpus, vocab_size: int, length: int, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self.usual: Usual = usual(windows(text.seen, length)) or Usual(0.0, 0.0, 0)
        self._pairs = Pairs(text.seen, vocab_size)
        self._known = set(words(self.decode(text.seen))) if tokenizer is not None else set()
        self.held_out = self.figures(windows(text.held_out, length, 8))
        self.babble = self.figures(_babble(text.seen, length, 8, seed))

    def decode(self, ids: Tensor) -> str:
        """Text of 1-D ids; without a tokenizer the ids themselves."""
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return self._tokenizer.decode(ids.tolist())

    def figures(self, rows: Tensor) -> Figures:
        """The figures of rows `[B, T]` together."""
        text = "\n".join(self.decode(row) for row in rows) if self._tokenizer is not None else ""
        return Figures(
            char_entropy(text) if text else None,
            unknown_words(text, self._known) if self._known else None,
            self._pairs.unseen(rows),
        )

    @property
    def limits(self) -> Figures:
        """From where on text counts as chaos."""
        held, babble = self.held_out, self.babble
        top = torch.tensor(max(2, len(set(self.decode(self._text.held_out))))).float().log2().item()
        return Figures(
            _halfway(held.entropy, top),
            # Young models write babble that is not chaos: words must be fewer than the corpus's pairs alone give.
            _halfway(max(held.unknown_words, babble.unknown_words), 1.0)
            if held.unknown_words is not None and babble.unknown_words is not None
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
        return (self.usual.loop + 1) / 2

    @property
    def repeated_limit(self) -> float:
        """Share of 4-grams that may have stood in the sample before."""
        return (self.usual.repeated + 1) / 2


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
    sample: Figures, yardstick: Yardstick, setting: str, text: str, likely: Sequence[str]
) -> Finding | None:
    """GG688 where a sample is beyond any of the limits."""
    limits, held = yardstick.limits, yardstick.held_out
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


def _babble(ids: Tensor, length: int, count: int, seed: int) -> Tensor:
    """Text by the corpus's own pairs: each token is one that followed the token before it somewhere in the corpus."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.sort(ids[:-1], stable=True)
    places, sorted_ids = order.indices, order.values
    now = ids[torch.randint(ids.numel() - 1, (count,), generator=generator)]
    rows = [now]
    for _ in range(length - 1):
        low = torch.searchsorted(sorted_ids, now, right=False)
        high = torch.searchsorted(sorted_ids, now, right=True)
        span = (high - low).clamp_min(1)
        pick = (low + (torch.rand(count, generator=generator) * span).long()).clamp_max(places.numel() - 1)
        now = ids[places[pick] + 1]
        rows.append(now)
    return torch.stack(rows, dim=1)
