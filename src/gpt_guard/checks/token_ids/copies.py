"""Copies in token ids: which stretches of n ids occur again, within the data or in another split.

Windows are compared by a 64-bit hash that is built by doubling (the hash of 2k ids from those of both halves), so that
all windows of a million ids take a tenth of a second whatever their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

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
"""What Lee et al. 2022 found in the validation sets of standard corpora; more is a warning."""
MAX_REPEATED = 0.5
"""Python's documentation repeats 0.35 of itself; data that was written twice repeats all."""
MAX_IDS = 3 * 2**22
"""Ids in which windows are looked for; two million take about half a second."""
CHUNK = 2**21
ANCHORS = 2**16
"""Windows that are looked for, evenly spaced: a share of them is known to within half a percentage point."""
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class Shared(NamedTuple):
    """How many of the windows were found: a share, the number asked, and the position of the first one found."""

    share: float
    windows: int
    first: int | None


def window_length(count: int, vocab_size: int) -> int:
    """Ids in a window, for a split of `count` ids of such a vocabulary (0 if unknown); less in a short split."""
    usual = WINDOW_CHARACTERS if 0 < vocab_size <= SMALL_VOCABULARY else WINDOW_TOKENS
    return min(usual, max(WINDOW_TOKENS, count // 4))


def sampled(ids: Tensor) -> Tensor:
    """All ids, or three stretches of a very long row: front, middle and end, where copies of whole files begin."""
    flat, third = ids.reshape(-1), MAX_IDS // 3
    if flat.numel() <= MAX_IDS:
        return flat
    middle = flat.numel() // 2
    return torch.cat([flat[:third], flat[middle : middle + third], flat[-third:]])


def part_of(ids: Tensor) -> str:
    """In words, how much of the ids was looked through; empty if all."""
    return f" in {MAX_IDS:,} of {ids.numel():,} ids" if ids.numel() > MAX_IDS else ""


def window_hashes(ids: Tensor, n: int) -> Tensor:
    """A hash `[N - n + 1]` of each window of n ids `[N]`; empty where there are fewer."""
    if ids.numel() < n:
        return torch.empty(0, dtype=torch.int64)
    level = ids.to("cpu", torch.int64) * _ODD[0]
    level ^= level >> 31
    whole: Tensor | None = None
    length, width, left = 0, 1, n
    while left:
        if left & 1:
            if whole is None:
                whole = level
            else:
                count = min(whole.numel(), level.numel() - length)
                whole = _join(whole[:count], level[length : length + count])
            length += width
        left >>= 1
        if left:
            level = _join(level[:-width], level[width:])
            width *= 2
    return level if whole is None else whole


def overlap(held_out: Tensor, train: Tensor, n: int) -> Shared:
    """The share of windows of n ids in `held_out` that occur in `train`, both 1-D; at most ANCHORS are looked for."""
    anchors, positions = _anchors(held_out, n)
    known, which = torch.unique(anchors, return_inverse=True)
    found = torch.zeros(known.numel(), dtype=torch.bool)
    for _, hashes in _chunks(train, n):
        place, same = _places(known, hashes)
        found[place[same]] = True
    return _shared(found[which], positions)


def repetition(ids: Tensor, n: int) -> Shared:
    """The share of windows of n ids that occur again in the same ids, at least n ids away."""
    anchors, positions = _anchors(ids, n)
    known, which = torch.unique(anchors, return_inverse=True)
    low = torch.full((known.numel(),), ids.numel())
    high = torch.full((known.numel(),), -1)
    for start, hashes in _chunks(ids, n):
        place, same = _places(known, hashes)
        at = same.nonzero().flatten() + start
        low.scatter_reduce_(0, place[same], at, "amin")
        high.scatter_reduce_(0, place[same], at, "amax")
    return _shared((high - low >= n)[which], positions)


def _anchors(ids: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Hashes of evenly spaced windows, and where they begin."""
    stride = max(1, -(-(ids.numel() - n + 1) // ANCHORS))
    hashes, positions = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for start, part in _chunks(ids, n):
        first = -start % stride
        hashes.append(part[first::stride])
        positions.append(torch.arange(start + first, start + part.numel(), stride))
    return torch.cat(hashes), torch.cat(positions)


def _chunks(ids: Tensor, n: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, ids.numel() - n + 1, CHUNK):
        yield start, window_hashes(ids[start : start + CHUNK + n - 1], n)


def _places(known: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """For each hash its place among the sorted known ones, and whether it is one of them."""
    place = torch.searchsorted(known, hashes).clamp_(max=known.numel() - 1)
    return place, known[place] == hashes


def _shared(found: Tensor, positions: Tensor) -> Shared:
    if found.numel() == 0:
        return Shared(0.0, 0, None)
    hits = found.nonzero().flatten()
    return Shared(hits.numel() / found.numel(), found.numel(), int(positions[hits[0]]) if hits.numel() else None)


def _join(left: Tensor, right: Tensor) -> Tensor:
    joined = left * _ODD[1] + right * _ODD[2]
    # Without a shift between the levels the hash would be a polynomial, and some periodic texts would collide.
    joined ^= joined >> 29
    return joined
