"""What an attention call lets each query see, whatever the convention of its mask; and what is odd about that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.functions.function_calls import FunctionCall

HIDDEN = -5e3
"""A score at or below this is masked. The mildest value in wide use is BERT's -10000 (Devlin et al. 2018, their code),
to which a score is added; scores themselves, `q @ k / sqrt(d)`, stay within some tens."""
_LEAST = 3
_MOST = 2**24
"""Entries of a mask that are looked at: those of a row of 4096 tokens. A larger one is said not to have been."""


class Visible(NamedTuple):
    """Which keys each query may see: bool `[..., L, S]`, where dimensions of size 1 stand for all.

    `soft` tells that what is hidden is only low, and not left out: a row of hidden keys alone is then uniform.
    """

    allowed: Tensor
    kind: str
    soft: bool = False

    @property
    def square(self) -> bool:
        """Whether queries and keys are the same number of places, as in self-attention."""
        return self.allowed.size(-1) == self.allowed.size(-2) >= _LEAST


def masks(call: FunctionCall) -> Iterator[tuple[str, Tensor]]:
    """The masks that a call was given, under their names."""
    for name in ("attn_mask", "key_padding_mask"):
        mask = call.get(name)
        if type(mask) is Tensor and mask.numel() and not mask.is_meta:
            yield name, mask


def visible(call: FunctionCall) -> list[Visible]:
    """What the call's masks leave visible; one entry for each mask, none where there is no mask."""
    if call.kind == "softmax":
        return _by_scores(call)
    found = []
    for name, mask in masks(call):
        if mask.numel() > _MOST:
            continue
        hides = call.kind == "multi_head_attention"
        allowed = (~mask if hides else mask) if mask.dtype is torch.bool else mask > HIDDEN
        if name == "key_padding_mask":
            allowed = allowed[..., None, :]
        if allowed.dim() >= 2:
            found.append(Visible(allowed, name, soft=mask.dtype is not torch.bool and bool(mask.isfinite().all())))
    return found


def _by_scores(call: FunctionCall) -> list[Visible]:
    scores = call.get("input")
    if type(scores) is not Tensor or scores.dim() < 3 or scores.numel() > _MOST or not scores.numel():
        return []
    if not scores.is_floating_point() or scores.is_meta:
        return []
    allowed = scores.detach() > HIDDEN
    soft = bool(scores.isfinite().all())
    return [] if bool(allowed.all()) else [Visible(allowed, "scores", soft)]


def causal(length: int, device: torch.device) -> Tensor:
    """What `is_causal=True` leaves visible: `[L, L]`."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def sees_only_the_future(seen: Visible) -> bool:
    """No query sees a key before it, and at least half of those behind it are seen by somebody."""
    allowed = seen.allowed
    if not seen.square or bool(allowed.tril(-1).any()):
        return False
    length = allowed.size(-1)
    return 2 * int(allowed.triu(1).sum()) >= allowed[..., 0, 0].numel() * length * (length - 1) // 2


def is_lower(seen: Visible) -> bool:
    """Whether nothing behind a query is visible to it, and something before it is."""
    return seen.square and not bool(seen.allowed.triu(1).any()) and bool(seen.allowed.tril(-1).any())


def blind(seen: Visible) -> Tensor:
    """Queries `[..., L]` that see no key, although others see them: they are no padding."""
    if not seen.square:
        return seen.allowed.new_zeros(())
    return ~seen.allowed.any(-1) & seen.allowed.any(-2)


def is_strict(seen: Visible) -> bool:
    """A lower triangle without its diagonal, the same for all rows and heads."""
    length = seen.allowed.size(-1)
    strict = causal(length, seen.allowed.device).tril(-1)
    return seen.square and bool((seen.allowed == strict).all())


def keys_by_row(seen: Visible, rows: int, length: int) -> Tensor | None:
    """Which keys of each row of the batch anybody sees, `[B, S]`; None where the mask does not tell rows apart."""
    allowed = seen.allowed.any(-2)
    if allowed.size(-1) != length or allowed.dim() < 2 or allowed.size(0) % rows:
        return None
    return allowed.reshape(rows, -1, length).any(1)


def only_padding(keys: Tensor, ids: Tensor) -> bool:
    """Whether all visible keys have one token id that no hidden one has, while the hidden ids differ.

    A single visible key may be a class token; a run of two in some row is padding.
    """
    shown, hidden = ids[keys].unique(), ids[~keys].unique()
    if shown.numel() != 1 or hidden.numel() < 2 or bool((hidden == shown).any()):
        return False
    return bool((keys[:, 1:] & keys[:, :-1]).any())


def only_the_end(keys: Tensor) -> bool:
    """Whether some rows show no key at all and the others only a run at their end: right padding, inverted."""
    count = keys.sum(1)
    tail = keys.flip(1).long().cumprod(1).sum(1)
    some = count > 0
    return bool((~some).any()) and bool(some.any()) and bool((count == tail)[some].all())


def zeros_and_ones(mask: Tensor) -> bool:
    """Whether a floating-point mask holds 0 and 1 and nothing else; a learned bias is not looked at."""
    if not mask.is_floating_point() or mask.requires_grad or mask.numel() > _MOST:
        return False
    return bool(((mask == 0) | (mask == 1)).all()) and bool((mask == 0).any()) and bool((mask == 1).any())


def runs_of_ones(mask: Tensor) -> bool:
    """Whether the ones of each row are one run from an end of it: a triangle or a padding mask, and no graph."""
    ones = mask.reshape(-1, mask.size(-1)).long()
    count = ones.sum(1)
    from_start, from_end = ones.cumprod(1).sum(1), ones.flip(1).cumprod(1).sum(1)
    return bool((count == from_start).all()) or bool((count == from_end).all())


def sees_padding(seen: Visible, ids: Tensor, padding: int) -> bool:
    """Whether a real token may see a padded place: ids `[B, T]`, whose padding stands at an end of each row."""
    real = ids != padding
    between = ~real & (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)
    lengths = real.sum(1)
    if bool(between.any()) or bool((lengths == lengths[0]).all()):
        return False
    rows, length = ids.shape
    allowed = seen.allowed
    if allowed.dim() > 2 and allowed.size(0) not in (1, rows) and allowed.size(0) % rows == 0:
        allowed = allowed.reshape(rows, -1, *allowed.shape[-2:])
    allowed = allowed.reshape(*allowed.shape[:1], -1, *allowed.shape[-2:]).any(1) if allowed.dim() > 2 else allowed
    return bool((allowed.expand(rows, length, length) & real[:, :, None] & ~real[:, None, :]).any())
