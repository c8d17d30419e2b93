"""What is wrong about what an attention call lets each query see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.hooks.functions.call_record import EmbeddedIds
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.functions.masks import HIDDEN, MOST_ENTRIES, VisibleKeys, given_masks, lower_triangle
from gpt_guard.records import Severity
from gpt_guard.records.render import number


def judge_masks(
    call: FunctionCall, seen: Sequence[VisibleKeys], embedded: Sequence[EmbeddedIds]
) -> Iterator[CallIssue]:
    """All that is wrong with a call of attention, or with a softmax over the keys. Reads the device."""
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
    for name, mask in given_masks(call):
        if _zeros_and_ones(mask):
            sure = _runs_of_ones(mask)
            text = (
                f"{name} {list(mask.shape)} is {str(mask.dtype).removeprefix('torch.')} and holds 0 and 1 only "
                f"({number(100 * float(mask.float().mean()))} % ones): it is added to the scores, and hides nothing."
            )
            yield CallIssue("GG669", text, ("as_float",) if sure else ("bias",), None if sure else Severity.WARNING)


def _padding_seen(
    call: FunctionCall, found: Sequence[VisibleKeys], embedded: Sequence[EmbeddedIds]
) -> Iterator[CallIssue]:
    rows, queries, keys = _sizes(call)
    alike = [each for each in embedded if each.padding is not None and each.ids.shape == (rows, queries)]
    if not alike or queries != keys:
        return
    # A masked score counts wherever it was masked; one mask alone may leave the padding to the other.
    shown = lower_triangle(queries, alike[0].ids.device)
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
    if not mask.is_floating_point() or mask.requires_grad or mask.numel() > MOST_ENTRIES:
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
