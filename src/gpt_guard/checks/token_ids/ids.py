"""Token ids by themselves: their figures, and what can be wrong with dtype, shape and range.

Figures are read in chunks, so that a file of any size takes little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.tokenizer.tokenizers import is_character_list
from gpt_guard.records import Finding

CHUNK = 2**22
MAX_BINS = 2**21
"""Ids above this are not counted one by one; no vocabulary is that large."""
IGNORED = (-100, -1)
"""Labels that mean "no loss here" in torch and in nanoGPT."""
SPECIALS = 128
"""Ids above 255 that a vocabulary of bytes may have: special tokens, rounded up to the next multiple of 128."""
NARROW = {7: torch.int8, 8: torch.uint8, 15: torch.int16, 16: torch.uint16}
"""Types, by the bits they have for positive numbers, that ids wrap around in."""
_SATURATED = 256


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


def is_integer(ids: Tensor) -> bool:
    """True for integers, whichever width; bool is none."""
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def type_name(ids: Tensor) -> str:
    """The dtype without the `torch.` in front."""
    return str(ids.dtype).removeprefix("torch.")


def not_integers(name: str, ids: Tensor) -> Finding:
    """GG632 for ids that cannot index an embedding."""
    whole = not ids.is_complex() and ids.dtype != torch.bool and bool((ids == ids.round()).all())
    what = "whole numbers, stored as floats" if whole else "not even whole numbers"
    likely = ["float"] if whole else ["wrong_tensor", "float"]
    seen = f"{name} is {type_name(ids)} {list(ids.shape)}: {ids.reshape(-1)[:6].tolist()}"
    text = f"{seen} ({what})" if ids.is_floating_point() else seen
    return finding("GG632", text, likely=likely, evidence={"dtype": type_name(ids)}, cause_id=name)


def bad_shape(name: str, ids: Tensor, row: int | None) -> Finding | None:
    """GG632 for a shape that no row can be cut from. Rows of block_size, or one more, are rows cut already: fine."""
    if ids.dim() == 1 or (ids.dim() == 2 and row is not None and ids.size(1) in (row, row + 1)):
        return None
    one = ids.dim() > 1 and ids.size(0) == 1
    likely = ["batch_dimension"] if one else ["one_hot"] if ids.dim() > 2 else ["rows", "one_hot"]
    seen = f"{name} has the shape {list(ids.shape)}; [N] is expected"
    return finding("GG632", seen, likely=likely, evidence={"shape": list(ids.shape)}, cause_id=name)


def too_narrow(name: str, ids: Tensor, vocab_size: int, tokens: Sequence[str]) -> Finding | None:
    """GG630 where ordinary tokens have ids that the dtype cannot hold.

    A vocabulary of bytes may have its special tokens beyond 255 and its data in uint8: those are added to the batch.
    """
    capacity = torch.iinfo(ids.dtype).max + 1
    beyond = vocab_size - capacity
    ordinary = beyond > SPECIALS or (is_character_list(tokens) and any(len(token) == 1 for token in tokens[capacity:]))
    if beyond <= 0 or not ordinary:
        return None
    seen = (
        f"{name} is {type_name(ids)}, which ends at {capacity - 1}, and the vocabulary has {vocab_size} ids: "
        f"{beyond} of them cannot be stored"
    )
    likely = (
        ["signed", "too_narrow"] if capacity < vocab_size <= 2 * capacity and ids.dtype.is_signed else ["too_narrow"]
    )
    return finding("GG630", seen, likely=likely, evidence={"dtype": type_name(ids), "beyond": beyond}, cause_id=name)


def wrapped(name: str, stats: IdStats, vocab_size: int) -> Finding | None:
    """GG630 for ids in a wide type that end where a narrow one does, though the vocabulary goes on well beyond.

    Only with as many ids as the vocabulary has, at least, all of the narrow range used to its end.
    """
    for bits in NARROW:
        end = 2**bits
        used_up = end - max(1, end // _SATURATED) <= stats.high < end
        enough = stats.total >= vocab_size and stats.distinct >= end // 2
        if used_up and enough and vocab_size > end + SPECIALS:
            seen = (
                f"{name}: the largest of {stats.total} ids is {stats.high}, where {NARROW[bits]} ends, and the "
                f"vocabulary has {vocab_size}; not one id lies in the {vocab_size - end} beyond"
            ).replace("torch.", "")
            evidence = {"max": stats.high, "distinct": stats.distinct}
            return finding("GG630", seen, likely=["cast_back"], evidence=evidence, cause_id=name)
    return None


def out_of_range(name: str, ids: Tensor, stats: IdStats, limit: int, why: str, tokens: Sequence[str]) -> Finding | None:
    """GG631 for ids that are negative or not below `limit`; `why` says where that is written. Reads the device."""
    if stats.low >= 0 and stats.high < limit:
        return None
    low, high = stats.low, stats.high
    count, first, value = _outside(ids, limit)
    likely: list[str] = []
    if low < 0:
        likely = ["ignore_index"] if low in IGNORED and high < limit else ["wrapped", "other_tokenizer"]
    elif high < len(tokens):
        likely = ["model_size"]
    elif high == limit:
        likely = ["off_by_one", "special"] if low >= 1 or count > 1 else ["special", "off_by_one"]
    else:
        likely = ["other_tokenizer", "special"]
    place = [int(each) for each in torch.unravel_index(torch.tensor(first), ids.shape)] if ids.dim() > 1 else first
    outside = f"{count} of {ids.numel()} are outside, the first is {value} at {place}"
    seen = f"{name}: ids go from {low} to {high}, and {why}: {outside}"
    evidence: dict[str, Any] = {"min": low, "max": high, "outside": count, "first": place, "limit": limit}
    return finding("GG631", seen, likely=likely, evidence=evidence, cause_id=name)


def _outside(ids: Tensor, limit: int) -> tuple[int, int, int]:
    """How many ids are negative or not below `limit`, where the first of them is, and which it is; at least one."""
    count, first, value = 0, -1, 0
    for start, part in _parts(ids):
        places = ((part < 0) | (part >= limit)).nonzero().flatten()
        if places.numel() and first < 0:
            first, value = start + int(places[0]), int(part[places[0]])
        count += places.numel()
    return count, first, value


def _parts(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    # uint16 and uint32 have neither minimum nor bincount: each part is cast.
    flat = ids.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield start, flat[start : start + CHUNK].to("cpu", torch.int64)
