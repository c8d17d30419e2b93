"""What can be wrong with token ids by themselves: dtype, shape, range, and ids that wrapped around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.token_ids.id_stats import IdStats, first_outside
from gpt_guard.checks.tokenizer.special import is_character_list
from gpt_guard.records import Finding

IGNORED = (-100, -1)
"""Labels that mean "no loss here" in torch and in nanoGPT."""
SPECIALS = 128
"""Ids above 255 that a vocabulary of bytes may have: special tokens, rounded up to the next multiple of 128."""
NARROW = {7: torch.int8, 8: torch.uint8, 15: torch.int16, 16: torch.uint16}
"""Types, by the bits they have for positive numbers, that ids wrap around in."""
_SATURATED = 256


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
    likely = ["signed", "too_narrow"] if capacity < vocab_size <= 2 * capacity and _signed(ids) else ["too_narrow"]
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
    count, first, value = first_outside(ids, 0, limit)
    low, high = stats.low, stats.high
    likely: list[str] = []
    if low < 0:
        likely = ["ignore_index"] if low in IGNORED and high < limit else ["wrapped", "other_tokenizer"]
    elif high < len(tokens):
        likely = ["model_size"]
    elif high == limit:
        likely = ["off_by_one", "special"] if low >= 1 or count > 1 else ["special", "off_by_one"]
    else:
        likely = ["other_tokenizer", "special"]
    place = list(_unravel(first, tuple(ids.shape))) if ids.dim() > 1 else first
    outside = f"{count} of {ids.numel()} are outside, the first is {value} at {place}"
    seen = f"{name}: ids go from {low} to {high}, and {why}: {outside}"
    evidence: dict[str, Any] = {"min": low, "max": high, "outside": count, "first": place, "limit": limit}
    return finding("GG631", seen, likely=likely, evidence=evidence, cause_id=name)


def _signed(ids: Tensor) -> bool:
    return torch.iinfo(ids.dtype).min < 0


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    return tuple(place)
