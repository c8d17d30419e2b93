"""Figures of a long row of token ids, read in chunks so that a file of any size takes little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**22
MAX_BINS = 2**21
"""Ids above this are not counted one by one; no vocabulary is that large."""


class IdStats(NamedTuple):
    """Number of ids, smallest, largest, and how often each id in 0 ... min(largest, MAX_BINS) occurs."""

    total: int
    low: int
    high: int
    counts: Tensor

    @property
    def distinct(self) -> int:
        """Different ids."""
        return int(self.counts.count_nonzero())


class Run(NamedTuple):
    """Equal ids one after the other."""

    start: int
    length: int
    id: int


def id_stats(ids: Tensor) -> IdStats:
    """Figures of ids of any integer dtype and shape, at least one id."""
    low, high = 2**63 - 1, -(2**63)
    counts = torch.zeros(1, dtype=torch.int64)
    for _, part in _parts(ids):
        smallest, largest = (int(value) for value in part.aminmax())
        low, high = min(low, smallest), max(high, largest)
        some = torch.bincount(part[(part >= 0) & (part <= MAX_BINS)], minlength=counts.numel())
        some[: counts.numel()] += counts
        counts = some
    return IdStats(ids.numel(), low, high, counts)


def first_outside(ids: Tensor, low: int, high: int) -> tuple[int, int, int]:
    """How many ids are below `low` or not below `high`, where the first of them is, and which it is; at least one."""
    count, first, value = 0, -1, 0
    for start, part in _parts(ids):
        places = ((part < low) | (part >= high)).nonzero().flatten()
        if places.numel() and first < 0:
            first, value = start + int(places[0]), int(part[places[0]])
        count += places.numel()
    return count, first, value


def runs(ids: Tensor, least: int) -> tuple[Run, list[Run]]:
    """The longest run of one id, and all runs of at least `least`, in order; `ids` has at least one."""
    longest, open_run = Run(0, 0, 0), Run(0, 0, 0)
    long: list[Run] = []
    for start, part in _parts(ids):
        borders = (part[1:] != part[:-1]).nonzero().flatten() + 1
        begins = torch.cat([borders.new_zeros(1), borders])
        lengths = torch.cat([borders, borders.new_tensor([part.numel()])]) - begins
        # Only the runs that matter leave the tensor: the long ones, the longest, and those at the chunk's two borders.
        keep = lengths >= least
        keep[[0, -1, int(lengths.argmax())]] = True
        for index in keep.nonzero().flatten().tolist():
            run = Run(start + int(begins[index]), int(lengths[index]), int(part[begins[index]]))
            if run.id == open_run.id and open_run.start + open_run.length == run.start and open_run.length:
                run = Run(open_run.start, open_run.length + run.length, run.id)
                if long and long[-1].start == run.start:
                    long.pop()
            longest = max(longest, run, key=lambda one: one.length)
            if run.length >= least:
                long.append(run)
            open_run = run
    return longest, long


def _parts(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    # uint16 and uint32 have neither minimum nor bincount: each part is cast.
    flat = ids.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield start, flat[start : start + CHUNK].to("cpu", torch.int64)
