"""Copies within the data and between its splits: how much is one too many."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.token_ids.windows import overlap, repetition
from gpt_guard.records import Finding, Severity

WINDOW_TOKENS = 50
"""Length of a copy that is no accident, in tokens of a large vocabulary: Lee et al. 2022, "Deduplicating Training
Data Makes Language Models Better", section 4.1."""
WINDOW_CHARACTERS = 200
"""The same in characters and bytes, at four to a token of English. Of WikiText-2's test text, no window of that length
occurs in its validation text; of 32 characters, one in a thousand does."""
SMALL_VOCABULARY = 512
"""Vocabularies up to here are of characters or bytes."""
MAX_OVERLAP = 0.2
"""Nested and repeated pages make up to 0.18 in Python's own documentation; a split gone wrong makes 0.5 to 1."""
COMMON_OVERLAP = 0.04
"""What Lee et al. 2022 found in the validation sets of standard corpora; more is said, though it fails nothing."""
MAX_REPEATED = 0.5
"""Python's documentation repeats 0.35 of itself; data that was written twice repeats all."""
MAX_IDS = 3 * 2**22
"""Ids in which windows are looked for; two million take about half a second."""


def window_length(count: int, vocab_size: int) -> int:
    """Ids in a window, for a split of `count` ids of such a vocabulary (0 if unknown); less in a short split."""
    usual = WINDOW_CHARACTERS if 0 < vocab_size <= SMALL_VOCABULARY else WINDOW_TOKENS
    return min(usual, max(WINDOW_TOKENS, count // 4))


def repeated(name: str, ids: Tensor, n: int, limit: float) -> tuple[float, Finding | None]:
    """The share of windows of n ids that occur again, and GG636 where it reaches `limit`."""
    found = repetition(_part(ids), n)
    if found.share < limit or not found.windows:
        return found.share, None
    flat = ids.reshape(-1)
    half = flat.numel() // 2
    twice = flat.numel() % 2 == 0 and torch.equal(flat[:half], flat[half:])
    rest = "; the second half is the first once more" if twice else ""
    seen = f"{name}: {found.share:.1%} of the windows of {n} ids occur more than once{rest}"
    likely = ["appended"] if twice else ["periodic"] if found.share > 0.99 else ["same_document"]
    return found.share, finding("GG636", seen, likely=likely, evidence=found._asdict(), cause_id=name)


def leaked(
    name: str, ids: Tensor, train: Tensor, n: int, limit: float, show: Callable[[Tensor], str]
) -> tuple[float, Finding | None]:
    """The share of windows of n ids that occur in `train`, and GG638: an error from `limit` on, a warning before.

    Up to COMMON_OVERLAP nothing is said. `show` puts ids into words.
    """
    found = overlap(_part(ids), _part(train), n)
    if found.share < min(COMMON_OVERLAP, limit) or found.first is None:
        return found.share, None
    fails = found.share >= limit
    whole = ["same_file", "rows_split"] if found.share > 0.98 else ["rows_split", "duplicates"]
    likely = whole if fails else ["boilerplate", "duplicates"]
    same = " (the two are equal)" if ids.shape == train.shape and torch.equal(ids.long(), train.long()) else ""
    text = show(_part(ids)[found.first : found.first + n])
    seen = f"{found.share:.1%} of the windows of {n} ids in {name} occur in train{same}; the first reads {text}"
    return found.share, finding(
        "GG638",
        seen,
        likely=likely,
        severity=Severity.ERROR if fails else Severity.WARNING,
        evidence={**found._asdict(), "window": n},
        cause_id=name,
    )


def part_of(ids: Tensor) -> str:
    """In words, how much of the ids was looked through; empty if all."""
    return f" in {MAX_IDS:,} of {ids.numel():,} ids" if ids.numel() > MAX_IDS else ""


def _part(ids: Tensor) -> Tensor:
    """All ids, or three stretches of a very long row: front, middle and end, where copies of whole files begin."""
    flat, third = ids.reshape(-1), MAX_IDS // 3
    if flat.numel() <= MAX_IDS:
        return flat
    middle = flat.numel() // 2
    return torch.cat([flat[:third], flat[middle : middle + third], flat[-third:]])
