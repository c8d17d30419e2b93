"""How much a text repeats itself: distinct n-grams, repeated n-grams, the longest loop; and what the corpus does.

Distinct-n: Li et al. 2016 (A Diversity-Promoting Objective Function for Neural Conversation Models). Loops as the mark
of degenerate decoding, and human text as the yardstick: Holtzman et al. 2020 (The Curious Case of Neural Text
Degeneration). The share of repeated n-grams is that of Welleck et al. 2020 (seq-rep-n).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

N = 4
"""Length of the n-grams: that of Welleck et al. 2020."""
WINDOWS = 100
"""Windows of the corpus that are measured for comparison."""


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


@dataclass(frozen=True)
class Usual:
    """What windows of the corpus reach: the largest loop, the 99th percentile of the share of repeated n-grams."""

    loop: float
    repeated: float
    windows: int


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


def usual(rows: Tensor, n: int = N) -> Usual | None:
    """The figures that windows of the corpus `[W, T]` reach, which are as long as the samples; None without any."""
    found = measure(rows, n)
    if not found:
        return None
    repeated = sorted(one.repeated for one in found)
    return Usual(max(one.loop for one in found), repeated[int(0.99 * (len(repeated) - 1))], len(found))


def windows(ids: Tensor, length: int, count: int = WINDOWS) -> Tensor:
    """Rows `[W, length]`, spread evenly over 1-D token ids; none where these are too few."""
    if ids.numel() < length or length < 1:
        return ids.new_zeros(0, max(length, 1))
    starts = torch.linspace(0, ids.numel() - length, min(count, ids.numel() - length + 1)).long()
    return ids[starts[:, None] + torch.arange(length)]


def _longest_runs(equal: Tensor) -> tuple[Tensor, Tensor]:
    """Length and start of the longest run of True in each row: the distance to the last False before it."""
    place = torch.arange(1, equal.size(1) + 1).expand(equal.shape)
    last_false = torch.where(equal, 0, place).cummax(dim=1).values
    runs, ends = (place - last_false).max(dim=1)
    return runs, ends - runs + 1
