"""By how many positions targets are shifted against inputs, found by comparing ids."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SHIFTS = (1, 0, 2, -1, 3, -2, 4, 5, 6, 7, 8)
"""Looked for in this order; of those that fit equally well the first is meant."""
SURE = 0.9
"""Share of positions that fit: less is packed documents, whose last targets are not in the row."""
CLEAR = 0.25
"""A smaller share is enough where it is ahead of every other shift by as much: inputs with noise on purpose."""
MIN_TARGETS = 4
"""From fewer nothing is concluded."""


class Shift(NamedTuple):
    """What was found: the shift, or None; the share of positions that fit it; how many there were; rows that do not."""

    shift: int | None
    share: float
    positions: int
    odd_rows: tuple[int, ...] = ()


def find_shift(x: Tensor, y: Tensor, ignore_index: int = -100, expected: int = 1) -> Shift:
    """The k for which y[:, t] is x[:, t + k], `[B, T]` both; targets of `ignore_index` are left out.

    Where several fit (constant or periodic rows), `expected` is found if it is one of them. Without positions, where
    fewer than MIN_TARGETS could show the expected shift. Reads the device.
    """
    x, y = x.long().cpu(), y.long().cpu()
    fits = {k: hits_of(x, y, k, ignore_index) for k in dict.fromkeys((expected, *SHIFTS))}
    shares = {k: _share(hits.sum(), known.sum()) for k, (hits, known) in fits.items() if known.sum() > 0}
    if fits[expected][1].sum() < MIN_TARGETS:
        return Shift(None, 0.0, 0)
    best = max(shares, key=lambda k: shares[k])  # the first of equals
    share, positions = shares[best], int(fits[best][1].sum())
    others = max((other for k, other in shares.items() if k != best), default=0.0)
    if share < SURE and (share < 0.5 or share - others < CLEAR):
        return Shift(None, share, positions)
    return Shift(best, share, positions, _odd_rows(fits, best))


def hits_of(x: Tensor, y: Tensor, k: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Hits and comparable targets of each row, `[B]` both."""
    length = x.size(1)
    if abs(k) >= length:
        nothing = torch.zeros(x.size(0), dtype=torch.int64)
        return nothing, nothing
    targets = y[:, : length - k] if k >= 0 else y[:, -k:]
    inputs = x[:, k:] if k >= 0 else x[:, : length + k]
    known = targets != ignore_index
    return ((targets == inputs) & known).sum(1), known.sum(1)


def _odd_rows(fits: dict[int, tuple[Tensor, Tensor]], best: int) -> tuple[int, ...]:
    """Rows in which this shift fails and another one holds."""
    hits, known = fits[best]
    fails = (hits < 0.5 * known) & (known >= 4)
    holds = torch.zeros_like(fails)
    for k, (other_hits, other_known) in fits.items():
        if k != best:
            holds |= (other_hits >= SURE * other_known) & (other_known >= 4)
    return tuple((fails & holds).nonzero().flatten().tolist())


def _share(hits: Tensor, known: Tensor) -> float:
    return float(hits) / float(known)
