"""What a mask lets each query of an attention see, whatever its convention: read in one way, with one threshold."""

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
MOST_ENTRIES = 2**24
"""Entries of a mask that are looked at: those of a row of 4096 tokens."""
# By kind of call: the masks among its arguments, and whether a boolean one says what is hidden.
_MASKS = {
    "attention": (("attn_mask",), False),
    "multi_head_attention": (("attn_mask", "key_padding_mask"), True),
    "masked_fill": (("mask",), True),
}


class VisibleKeys(NamedTuple):
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

    @property
    def only_the_future(self) -> bool:
        """No query sees a key before it, and at least half of those behind it are seen by somebody."""
        if not self.square or bool(self.allowed.tril(-1).any()):
            return False
        length = self.allowed.size(-1)
        return 2 * int(self.allowed.triu(1).sum()) >= self.allowed[..., 0, 0].numel() * length * (length - 1) // 2

    @property
    def only_the_past(self) -> bool:
        """Whether nothing behind a query is visible to it, and something before it is."""
        return self.square and not bool(self.allowed.triu(1).any()) and bool(self.allowed.tril(-1).any())

    @property
    def blind(self) -> Tensor:
        """Queries `[..., L]` that see no key, although others see them: they are no padding."""
        if not self.square:
            return self.allowed.new_zeros(())
        return ~self.allowed.any(-1) & self.allowed.any(-2)

    @property
    def strict(self) -> bool:
        """A lower triangle without its diagonal, the same for all rows and heads."""
        below = lower_triangle(self.allowed.size(-1), self.allowed.device).tril(-1)
        return self.square and bool((self.allowed == below).all())

    def by_row(self, rows: int, length: int) -> Tensor | None:
        """Which keys of each row of the batch anybody sees, `[B, S]`; None where the mask does not tell rows apart."""
        allowed = self.allowed.any(-2)
        if allowed.size(-1) != length or allowed.dim() < 2 or allowed.size(0) % rows:
            return None
        return allowed.reshape(rows, -1, length).any(1)


def given_masks(call: FunctionCall) -> Iterator[tuple[str, Tensor]]:
    """The masks that a call was given, under their names."""
    for name in _MASKS[call.kind][0]:
        mask = call.get(name)
        if type(mask) is Tensor and mask.numel() and not mask.is_meta:
            yield name, mask


def visible_keys(call: FunctionCall) -> list[VisibleKeys]:
    """What the masks of a call leave visible; one entry for each mask, none where there is no mask.

    Of a softmax it is what the scores leave visible that were masked before. Reads the device.
    """
    if call.kind == "softmax":
        return _by_scores(call)
    found = []
    for name, mask in given_masks(call):
        if mask.numel() > MOST_ENTRIES:
            continue
        yes_or_no = mask.dtype is torch.bool
        allowed = mask > HIDDEN if not yes_or_no else ~mask if _MASKS[call.kind][1] else mask
        if name == "key_padding_mask":
            allowed = allowed[..., None, :]
        if allowed.dim() >= 2:
            found.append(VisibleKeys(allowed, name, soft=not yes_or_no and bool(mask.isfinite().all())))
    return found


def _by_scores(call: FunctionCall) -> list[VisibleKeys]:
    scores = call.get("input")
    if type(scores) is not Tensor or scores.dim() < 3 or scores.numel() > MOST_ENTRIES or not scores.numel():
        return []
    if not scores.is_floating_point() or scores.is_meta:
        return []
    allowed = scores.detach() > HIDDEN
    soft = bool(scores.isfinite().all())
    return [] if bool(allowed.all()) else [VisibleKeys(allowed, "scores", soft)]


def lower_triangle(length: int, device: torch.device) -> Tensor:
    """What `is_causal=True` leaves visible: `[L, L]`."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
