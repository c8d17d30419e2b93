"""Which stretches of n token ids occur where: repetition within the data, and overlap between splits.

Windows are compared by a 64-bit hash that is built by doubling (the hash of 2k ids from those of both halves), so that
all windows of a million ids take a tenth of a second whatever their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**21
ANCHORS = 2**16
"""Windows that are looked for, evenly spaced: a share of them is known to within half a percentage point."""
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class Shared(NamedTuple):
    """How many of the windows were found: a share, the number asked, and the position of the first one found."""

    share: float
    windows: int
    first: int | None


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
