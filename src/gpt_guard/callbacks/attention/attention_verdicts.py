"""What is wrong with one attention call: each verdict has its code, its words and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.attention import attention_masks as looks
from gpt_guard.callbacks.attention.attention_masks import Visible
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number


class Tokens(NamedTuple):
    """Ids `[B, T]` that entered an embedding of this forward, the padding it declares, and its width."""

    ids: Tensor
    padding: int | None
    width: int


@dataclass
class Verdict:
    """`held` waits for the end of the forward under this key: another call of it may show that it is meant."""

    code: str
    words: str
    likely: list[str]
    severity: Severity | None = None
    held: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


def verdicts(call: FunctionCall, tokens: Sequence[Tokens]) -> Iterator[Verdict]:
    """All that is wrong with a call of attention, or with a softmax over the keys. Reads the device."""
    seen = looks.visible(call)
    for each in seen:
        yield from _sense(each)
        yield from _padding_sense(each, tokens)
        yield from _blind(call, each, tokens)
    if call.kind == "softmax":
        return
    yield from _zero_one(call)
    yield from _padding_seen(call, seen, tokens)
    if call.kind == "attention":
        yield from _top_left(call)
        yield from _heads_first(call, tokens)


def softmax_dim(call: FunctionCall, tokens: Sequence[Tokens], key: str) -> Iterator[Verdict]:
    """A softmax over the queries of a square of scores `[..., T, T]`."""
    scores, dim = call.get("input"), call.get("dim")
    if dim % scores.dim() != scores.dim() - 2 or scores.size(-1) != scores.size(-2):
        return
    masked = bool((scores.detach() <= looks.HIDDEN).any())
    if scores.size(-1) in {each.ids.size(1) for each in tokens} and (masked or scores.dim() == 4):
        words = f"softmax over dim={dim} of scores {list(scores.shape)}: over the queries, not over the keys."
        yield Verdict("GG698", words, ["softmax_dim"], Severity.ERROR if masked else Severity.WARNING, held=key)


def _sense(seen: Visible) -> Iterator[Verdict]:
    if not looks.sees_only_the_future(seen):
        return
    if bool(seen.allowed.diagonal(dim1=-2, dim2=-1).any()):
        words = "The mask lets each position see itself and what comes after it, and nothing before it."
        yield Verdict("GG697", words, ["triangle", "backwards"], Severity.WARNING, held="backwards")
    else:
        words = "The mask lets each position see what comes after it, and nothing before it; the last sees nothing."
        yield Verdict("GG697", words, ["convention", "triangle"])


def _padding_sense(seen: Visible, tokens: Sequence[Tokens]) -> Iterator[Verdict]:
    for each in tokens:
        keys = looks.keys_by_row(seen, *each.ids.shape)
        if keys is not None and looks.only_padding(keys, each.ids):
            shown = int(each.ids[keys][0])
            words = f"The mask shows the places of id {shown} alone, and hides all others."
            yield Verdict("GG697", words, ["padding_sense", "convention"], evidence={"padding": shown})
            return
    if seen.kind == "key_padding_mask" and looks.only_the_end(seen.allowed[..., 0, :]):
        words = "The padding mask shows the end of short rows alone, and nothing of the longest."
        yield Verdict("GG697", words, ["padding_sense", "convention"], Severity.WARNING)


def _blind(call: FunctionCall, seen: Visible, tokens: Sequence[Tokens]) -> Iterator[Verdict]:
    blind = looks.blind(seen)
    if not bool(blind.any()) or looks.sees_only_the_future(seen):
        return
    strict = looks.is_strict(seen)
    first = [int(place) for place in blind.nonzero()[0]]
    words = (
        f"{int(blind.sum())} of {blind.numel()} queries see no key, although others see them; the first is at {first} "
        f"of {list(blind.shape)}."
    )
    # What this call leaves out is zero: for the first token of a strict triangle, and for a node without neighbours,
    # that may be meant.
    of_tokens = any(each.ids.size(1) == blind.size(-1) for each in tokens)
    mild = call.kind == "attention" and not seen.soft and (strict or not of_tokens)
    severity = Severity.INFO if mild else Severity.WARNING
    yield Verdict("GG699", words, ["off_by_one"] if strict else ["both_masks"], severity, evidence={"first": first})


def _zero_one(call: FunctionCall) -> Iterator[Verdict]:
    for name, mask in looks.masks(call):
        if looks.zeros_and_ones(mask):
            sure = looks.runs_of_ones(mask)
            words = (
                f"{name} {list(mask.shape)} is {str(mask.dtype).removeprefix('torch.')} and holds 0 and 1 only "
                f"({number(100 * float(mask.float().mean()))} % ones): it is added to the scores, and hides nothing."
            )
            yield Verdict("GG669", words, ["as_float"] if sure else ["bias"], None if sure else Severity.WARNING)


def _padding_seen(call: FunctionCall, found: list[Visible], tokens: Sequence[Tokens]) -> Iterator[Verdict]:
    rows, queries, keys = _sizes(call)
    alike = [each for each in tokens if each.padding is not None and each.ids.shape == (rows, queries)]
    if not alike or queries != keys:
        return
    # A masked score counts wherever it was masked; one mask alone may leave the padding to the other.
    shown: Tensor = looks.causal(queries, alike[0].ids.device)
    if not call.get("is_causal", False) or call.kind != "attention":
        shown = torch.ones_like(shown)
    for each in found:
        allowed = each.allowed
        if allowed.dim() >= 3 and allowed.size(0) not in (1, rows) and allowed.size(0) % rows == 0:
            allowed = allowed.reshape(rows, -1, *allowed.shape[-2:])
        shown = shown & (allowed.any(1) if allowed.dim() == 4 else allowed)
    seen = Visible(shown, "all")
    # Where source and target have one shape, it must hold for both.
    if all(looks.sees_padding(seen, each.ids, each.padding) for each in alike if each.padding is not None):
        share = float(alike[-1].ids.eq(alike[-1].padding or 0).float().mean())
        words = (
            f"Real tokens may see padding: {number(100 * share)} % of the ids are padding_idx={alike[-1].padding}, and "
            f"{'the mask leaves them visible' if found else 'the call has no mask'}."
        )
        yield Verdict("GG662", words, ["not_masked"], Severity.WARNING)


def _sizes(call: FunctionCall) -> tuple[int, int, int]:
    """Rows of the batch, queries and keys; `nn.MultiheadAttention` hands on `[T, B, C]`."""
    query, key = call.get("query"), call.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() < 3:
        return 0, 0, 0
    if call.kind == "multi_head_attention":
        return query.size(1), query.size(0), key.size(0)
    return query.size(0), query.size(-2), key.size(-2)


def _top_left(call: FunctionCall) -> Iterator[Verdict]:
    _, queries, keys = _sizes(call)
    if call.get("is_causal", False) and 1 <= queries < keys:
        words = (
            f"is_causal=True with {queries} queries and {keys} keys: the first query sees key 0 alone, and the last "
            f"{keys - queries} keys are seen by nobody."
        )
        yield Verdict("GG668", words, ["cache"], evidence={"queries": queries, "keys": keys})


def _heads_first(call: FunctionCall, tokens: Sequence[Tokens]) -> Iterator[Verdict]:
    query, key = call.get("query"), call.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() != 4 or query.shape != key.shape:
        return
    rows, length, heads, size = query.shape
    for each in tokens:
        # [B, T, heads, size] and [B, heads, L, size] are told apart by the width, which is heads times size.
        by_width = heads * size == each.width and length * size != each.width
        if each.ids.shape == (rows, length) and heads != length and by_width:
            words = (
                f"q is {list(query.shape)} where ids are {[rows, length]}: the {heads} heads of a token look at each "
                f"other, and no token sees another."
            )
            yield Verdict("GG698", words, ["heads_first"])
            return
