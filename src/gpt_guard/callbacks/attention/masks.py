"""What an attention call lets each query see, whatever the convention of its mask, and what is wrong about that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.hooks.functions.call_record import HIDDEN, EmbeddedIds
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

_LEAST = 3
_MOST = 2**24
"""Entries of a mask that are looked at: those of a row of 4096 tokens. A larger one is said not to have been."""


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
        below = _causal(self.allowed.size(-1), self.allowed.device).tril(-1)
        return self.square and bool((self.allowed == below).all())

    def by_row(self, rows: int, length: int) -> Tensor | None:
        """Which keys of each row of the batch anybody sees, `[B, S]`; None where the mask does not tell rows apart."""
        allowed = self.allowed.any(-2)
        if allowed.size(-1) != length or allowed.dim() < 2 or allowed.size(0) % rows:
            return None
        return allowed.reshape(rows, -1, length).any(1)


def masks(call: FunctionCall) -> Iterator[tuple[str, Tensor]]:
    """The masks that a call was given, under their names."""
    for name in ("attn_mask", "key_padding_mask"):
        mask = call.get(name)
        if type(mask) is Tensor and mask.numel() and not mask.is_meta:
            yield name, mask


def visible(call: FunctionCall) -> list[VisibleKeys]:
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
            found.append(VisibleKeys(allowed, name, soft=mask.dtype is not torch.bool and bool(mask.isfinite().all())))
    return found


def _by_scores(call: FunctionCall) -> list[VisibleKeys]:
    scores = call.get("input")
    if type(scores) is not Tensor or scores.dim() < 3 or scores.numel() > _MOST or not scores.numel():
        return []
    if not scores.is_floating_point() or scores.is_meta:
        return []
    allowed = scores.detach() > HIDDEN
    soft = bool(scores.isfinite().all())
    return [] if bool(allowed.all()) else [VisibleKeys(allowed, "scores", soft)]


def judge_masks(call: FunctionCall, embedded: Sequence[EmbeddedIds]) -> Iterator[CallIssue]:
    """All that is wrong with a call of attention, or with a softmax over the keys. Reads the device."""
    seen = visible(call)
    for each in seen:
        yield from _sense(each)
        yield from _padding_sense(each, embedded)
        yield from _blind(call, each, embedded)
    if call.kind == "softmax":
        return
    yield from _zero_one(call)
    yield from _padding_seen(call, seen, embedded)
    if call.kind == "attention":
        yield from _top_left(call)
        yield from _heads_first(call, embedded)


def softmax_dim(call: FunctionCall, embedded: Sequence[EmbeddedIds], key: str) -> Iterator[CallIssue]:
    """A softmax over the queries of a square of scores `[..., T, T]`."""
    scores, dim = call.get("input"), call.get("dim")
    if dim % scores.dim() != scores.dim() - 2 or scores.size(-1) != scores.size(-2):
        return
    masked = bool((scores.detach() <= HIDDEN).any())
    if scores.size(-1) in {each.ids.size(1) for each in embedded} and (masked or scores.dim() == 4):
        text = f"softmax over dim={dim} of scores {list(scores.shape)}: over the queries, not over the keys."
        yield CallIssue("GG698", text, ("softmax_dim",), Severity.ERROR if masked else Severity.WARNING, unless=key)


def _sense(seen: VisibleKeys) -> Iterator[CallIssue]:
    if not seen.only_the_future:
        return
    if bool(seen.allowed.diagonal(dim1=-2, dim2=-1).any()):
        text = "The mask lets each position see itself and what comes after it, and nothing before it."
        yield CallIssue("GG697", text, ("triangle", "backwards"), Severity.WARNING, unless="backwards")
    else:
        text = "The mask lets each position see what comes after it, and nothing before it; the last sees nothing."
        yield CallIssue("GG697", text, ("convention", "triangle"))


def _padding_sense(seen: VisibleKeys, embedded: Sequence[EmbeddedIds]) -> Iterator[CallIssue]:
    for each in embedded:
        keys = seen.by_row(*each.ids.shape)
        if keys is not None and _only_padding(keys, each.ids):
            shown = int(each.ids[keys][0])
            text = f"The mask shows the places of id {shown} alone, and hides all others."
            yield CallIssue("GG697", text, ("padding_sense", "convention"), evidence={"padding": shown})
            return
    if seen.kind == "key_padding_mask" and _only_the_end(seen.allowed[..., 0, :]):
        text = "The padding mask shows the end of short rows alone, and nothing of the longest."
        yield CallIssue("GG697", text, ("padding_sense", "convention"), Severity.WARNING)


def _blind(call: FunctionCall, seen: VisibleKeys, embedded: Sequence[EmbeddedIds]) -> Iterator[CallIssue]:
    blind = seen.blind
    if not bool(blind.any()) or seen.only_the_future:
        return
    strict = seen.strict
    first = [int(place) for place in blind.nonzero()[0]]
    text = (
        f"{int(blind.sum())} of {blind.numel()} queries see no key, although others see them; the first is at {first} "
        f"of {list(blind.shape)}."
    )
    # What this call leaves out is zero: for the first token of a strict triangle, and for a node without neighbours,
    # that may be meant.
    of_tokens = any(each.ids.size(1) == blind.size(-1) for each in embedded)
    mild = call.kind == "attention" and not seen.soft and (strict or not of_tokens)
    severity = Severity.INFO if mild else Severity.WARNING
    yield CallIssue("GG699", text, ("off_by_one",) if strict else ("both_masks",), severity, evidence={"first": first})


def _zero_one(call: FunctionCall) -> Iterator[CallIssue]:
    for name, mask in masks(call):
        if _zeros_and_ones(mask):
            sure = _runs_of_ones(mask)
            text = (
                f"{name} {list(mask.shape)} is {str(mask.dtype).removeprefix('torch.')} and holds 0 and 1 only "
                f"({number(100 * float(mask.float().mean()))} % ones): it is added to the scores, and hides nothing."
            )
            yield CallIssue("GG669", text, ("as_float",) if sure else ("bias",), None if sure else Severity.WARNING)


def _padding_seen(call: FunctionCall, found: list[VisibleKeys], embedded: Sequence[EmbeddedIds]) -> Iterator[CallIssue]:
    rows, queries, keys = _sizes(call)
    alike = [each for each in embedded if each.padding is not None and each.ids.shape == (rows, queries)]
    if not alike or queries != keys:
        return
    # A masked score counts wherever it was masked; one mask alone may leave the padding to the other.
    shown = _causal(queries, alike[0].ids.device)
    if not call.get("is_causal", False) or call.kind != "attention":
        shown = torch.ones_like(shown)
    for each in found:
        allowed = each.allowed
        if allowed.dim() >= 3 and allowed.size(0) not in (1, rows) and allowed.size(0) % rows == 0:
            allowed = allowed.reshape(rows, -1, *allowed.shape[-2:])
        shown = shown & (allowed.any(1) if allowed.dim() == 4 else allowed)
    # Where source and target have one shape, it must hold for both.
    if all(_sees_padding(shown, each.ids, each.padding) for each in alike if each.padding is not None):
        share = float(alike[-1].ids.eq(alike[-1].padding or 0).float().mean())
        text = (
            f"Real tokens may see padding: {number(100 * share)} % of the ids are padding_idx={alike[-1].padding}, and "
            f"{'the mask leaves them visible' if found else 'the call has no mask'}."
        )
        yield CallIssue("GG662", text, ("not_masked",), Severity.WARNING)


def _sizes(call: FunctionCall) -> tuple[int, int, int]:
    """Rows of the batch, queries and keys; `nn.MultiheadAttention` hands on `[T, B, C]`."""
    query, key = call.get("query"), call.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() < 3:
        return 0, 0, 0
    if call.kind == "multi_head_attention":
        return query.size(1), query.size(0), key.size(0)
    return query.size(0), query.size(-2), key.size(-2)


def _top_left(call: FunctionCall) -> Iterator[CallIssue]:
    _, queries, keys = _sizes(call)
    if call.get("is_causal", False) and 1 <= queries < keys:
        text = (
            f"is_causal=True with {queries} queries and {keys} keys: the first query sees key 0 alone, and the last "
            f"{keys - queries} keys are seen by nobody."
        )
        yield CallIssue("GG668", text, ("cache",), evidence={"queries": queries, "keys": keys})


def _heads_first(call: FunctionCall, embedded: Sequence[EmbeddedIds]) -> Iterator[CallIssue]:
    query, key = call.get("query"), call.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() != 4 or query.shape != key.shape:
        return
    rows, length, heads, size = query.shape
    for each in embedded:
        # [B, T, heads, size] and [B, heads, L, size] are told apart by the width, which is heads times size.
        by_width = heads * size == each.width and length * size != each.width
        if each.ids.shape == (rows, length) and heads != length and by_width:
            text = (
                f"q is {list(query.shape)} where ids are {[rows, length]}: the {heads} heads of a token look at each "
                f"other, and no token sees another."
            )
            yield CallIssue("GG698", text, ("heads_first",))
            return


def _only_padding(keys: Tensor, ids: Tensor) -> bool:
    """Whether all visible keys have one token id that no hidden one has, while the hidden ids differ.

    A single visible key may be a class token; a run of two in some row is padding.
    """
    shown, hidden = ids[keys].unique(), ids[~keys].unique()
    if shown.numel() != 1 or hidden.numel() < 2 or bool((hidden == shown).any()):
        return False
    return bool((keys[:, 1:] & keys[:, :-1]).any())


def _only_the_end(keys: Tensor) -> bool:
    """Whether some rows show no key at all and the others only a run at their end: right padding, inverted."""
    count = keys.sum(1)
    tail = keys.flip(1).long().cumprod(1).sum(1)
    some = count > 0
    return bool((~some).any()) and bool(some.any()) and bool((count == tail)[some].all())


def _zeros_and_ones(mask: Tensor) -> bool:
    """Whether a floating-point mask holds 0 and 1 and nothing else; a learned bias is not looked at."""
    if not mask.is_floating_point() or mask.requires_grad or mask.numel() > _MOST:
        return False
    return bool(((mask == 0) | (mask == 1)).all()) and bool((mask == 0).any()) and bool((mask == 1).any())


def _runs_of_ones(mask: Tensor) -> bool:
    """Whether the ones of each row are one run from an end of it: a triangle or a padding mask, and no graph."""
    ones = mask.reshape(-1, mask.size(-1)).long()
    count = ones.sum(1)
    from_start, from_end = ones.cumprod(1).sum(1), ones.flip(1).cumprod(1).sum(1)
    return bool((count == from_start).all()) or bool((count == from_end).all())


def padding_inside(ids: Tensor, padding: int) -> Tensor:
    """Where padding has real tokens on both sides, in ids `[B, T]`."""
    real = ids != padding
    return ~real & (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)


def _sees_padding(allowed: Tensor, ids: Tensor, padding: int) -> bool:
    """Whether a real token may see a padded place: ids `[B, T]`, whose padding stands at an end of each row."""
    real = ids != padding
    lengths = real.sum(1)
    if bool(padding_inside(ids, padding).any()) or bool((lengths == lengths[0]).all()):
        return False
    rows, length = ids.shape
    return bool((allowed.expand(rows, length, length) & real[:, :, None] & ~real[:, None, :]).any())


def _causal(length: int, device: torch.device) -> Tensor:
    """What `is_causal=True` leaves visible: `[L, L]`."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
