"""How much a text repeats itself: distinct n-grams, repeated n-grams, the longest loop; and what the corpus does.

Distinct-n: Li et al. 2016 (A Diversity-Promoting Objective Function for Neural Conversation Models). Loops as the mark
of degenerate decoding, and human text as the yardstick: Holtzman et al. 2020 (The Curious Case of Neural Text
Degeneration). The share of repeated n-grams is that of Welleck et al. 2020 (seq-rep-n).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

N = 4
"""Length of the n-grams: that of Welleck et al. 2020."""
WINDOWS = 200
"""Windows of the corpus that are measured for comparison."""


@dataclass(frozen=True)
class Repetition:
    """The figures of one text: `repeated` is the share of n-grams that stand in it before, `loop` that of the longest
    stretch that repeats one period, `period` its length in tokens."""

    distinct: float
    repeated: float
    loop: float
    period: int
    start: int = 0


@dataclass(frozen=True)
class Usual:
    """What windows of the corpus, as long as the samples, reach: their largest loop, and the 99th percentile of the
    share of repeated n-grams."""

    loop: float
    repeated: float
    windows: int


def measure(ids: Sequence[int], n: int = N) -> Repetition:
    """The figures of one row of ids; of a row shorter than n + 1 all are those of a text that repeats nothing."""
    if len(ids) <= n:
        return Repetition(1.0, 0.0, 0.0, 0)
    grams = {tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)}
    distinct = len(grams) / (len(ids) - n + 1)
    share, period, start = longest_loop(ids)
    return Repetition(distinct, 1.0 - distinct, share, period, start)


def longest_loop(ids: Sequence[int]) -> tuple[float, int, int]:
    """Share, period and start of the longest stretch in which every id equals the one a period before it.

    A stretch counts from three rounds on, and from 6 ids on: two rounds are a phrase that was used twice.
    """
    row = torch.as_tensor(ids)
    best = (0, 0, 0)
    for period in range(1, len(row) // 3 + 1):
        equal = row[period:] == row[:-period]
        run, start = _longest_run(equal)
        length = run + period
        if run >= 2 * period and length >= 6 and length > best[0]:
            best = (length, period, start)
    return best[0] / max(1, len(row)), best[1], best[2]


def usual(rows: Iterable[Sequence[int]], n: int = N) -> Usual | None:
    """The figures that the corpus itself reaches, over windows of the samples' length; None without any."""
    found = [measure(row, n) for row in rows]
    if not found:
        return None
    repeated = sorted(one.repeated for one in found)
    return Usual(max(one.loop for one in found), repeated[int(0.99 * (len(repeated) - 1))], len(found))


def windows(ids: Tensor, length: int, count: int = WINDOWS) -> list[list[int]]:
    """Rows of that length, spread evenly over 1-D token ids."""
    if ids.numel() < length or length < 1:
        return []
    starts = torch.linspace(0, ids.numel() - length, min(count, ids.numel() - length + 1)).long().tolist()
    return [ids[start : start + length].tolist() for start in starts]


def _longest_run(equal: Tensor) -> tuple[int, int]:
    """Length and start of the longest run of True."""
    if not bool(equal.any()):
        return 0, 0
    padded = torch.cat([equal.new_zeros(1), equal, equal.new_zeros(1)]).int()
    edges = padded.diff()
    starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    lengths = ends - starts
    where = int(lengths.argmax())
    return int(lengths[where]), int(starts[where])
