"""Does a model that is trained to predict the next token see it? Asked by changing the last token alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.probes.leak_words import distances, is_router, likely_future
from gpt_guard.callbacks.probes.probe_ask import Answer, Asker, by_place
from gpt_guard.callbacks.probes.probe_batch import Attended, Shift
from gpt_guard.catalogue import finding
from gpt_guard.hooks.isolation.compare import FirstDifference, at_positions, difference, first_difference, traced
from gpt_guard.records import Finding, Moment, Severity
from gpt_guard.records.render import number

_BY_MASK = ("no_mask", "off_by_one", "soft_mask", "mask_sense")


class Leak(NamedTuple):
    """The largest change before the token that was changed; `readers` are the positions that saw it."""

    change: float
    scale: float
    row: int
    reader: int
    source: int
    readers: list[int]
    share: float


def future_findings(asker: Asker, shift: Shift, first: Answer) -> Iterator[Finding]:
    """GG660 where logits that have a target change with a token that comes later.

    Only positions whose target counts in the loss are compared: the prefix of a prefix language model may see all of
    itself. In a row the last token that is predicted is changed, padding never.
    """
    ids = asker.batch.tokens[shift.position]
    # [B, T], wherever the model has them.
    valid = shift.valid if shift.time == 1 else shift.valid.t()
    columns = valid.any(0).nonzero().flatten()
    if not columns.numel():
        return
    source = int(columns[-1]) + 1
    where = torch.zeros_like(valid)
    where[:, source] = valid[:, source - 1]
    changed = asker.batch.other(shift.position, where if shift.time == 1 else where.t(), seed=0)
    if changed is None:
        return
    second = asker.ask({shift.position: changed})
    leak = None
    for one, other in zip(_logits(asker, first, shift), _logits(asker, second, shift), strict=False):
        leak = leak or _leak(asker, one, other, valid, source)
    if leak is None:
        return
    blame = _blame(asker, shift, ids, changed, source)
    yield _finding(asker, shift, leak, blame)


def _logits(asker: Asker, answer: Answer, shift: Shift) -> list[Tensor]:
    """The one output that is logits `[B, T, V]`; else what losses inside of forward compared.

    Of several outputs (a model that reads both ways has two) none can be told to be the one that must not see ahead.
    """
    ids = asker.batch.tokens[shift.position]
    rows, length = ids.shape
    highest = int(ids.max())
    for tensors in (list(answer.outputs.values()), answer.scores):
        placed = [each for tensor in tensors if (each := by_place(tensor, rows, length)) is not None]
        placed = [each for each in placed if each.dim() == 3 and each.size(-1) > highest]
        if len(placed) == 1:
            return [placed[0] if shift.time == 1 else placed[0].transpose(0, 1)]
    return []


def _leak(asker: Asker, one: Tensor, other: Tensor, valid: Tensor, source: int) -> Leak | None:
    if one.shape != other.shape:
        return None
    apart = difference(one, other).amax(-1)
    length = apart.size(1)
    before = apart[:, : min(source, length)]
    before = before.masked_fill(~valid[:, : before.size(1)], 0.0)
    change = float(before.max())
    if change <= asker.allowed(one):
        return None
    place = int(before.argmax())
    readers = (before.amax(0) > asker.allowed(one)).nonzero().flatten().tolist()
    own = float(apart[:, source:].max()) if source < length else 0.0
    return Leak(
        change,
        float(one.abs().max()),
        place // before.size(1),
        place % before.size(1),
        source,
        readers,
        change / own if own else 1.0,
    )


def _blame(asker: Asker, shift: Shift, ids: Tensor, changed: Tensor, source: int) -> FirstDifference | None:
    model = asker.watch.model
    one = traced(model, lambda: asker.ask(regardless=True))
    other = traced(model, lambda: asker.ask({shift.position: changed}, regardless=True))
    rows, length = ids.shape if shift.time == 1 else reversed(ids.shape)
    return first_difference(model, one, other, at_positions(rows, length, slice(0, source)))


def _finding(asker: Asker, shift: Shift, leak: Leak, blame: FirstDifference | None) -> Finding:
    watch = asker.watch
    length = shift.valid.size(shift.time)
    pairs = [(reader, leak.source) for reader in leak.readers]
    attended = next((each for each in asker.batch.attended if blame is not None and _made_by(blame, each)), None)
    bare = attended is not None and not attended.masked
    seen = (
        f"The logits at position {leak.reader} of row {leak.row} change by {number(leak.change)} when token "
        f"{leak.source} alone changes (the largest logit is {number(leak.scale)}), and the loss compares them with the "
        f"token that follows: {len(leak.readers)} positions see {distances(pairs, length)}."
    )
    if bare:
        seen += " The attention call there has neither a mask nor is_causal=True."
    likely = likely_future(watch.model, blame, pairs, leak.share, length)
    likely = ["no_mask", *likely] if bare else likely
    named = blame.named if blame is not None else {}
    if attended is not None and attended.where is not None and likely and likely[0] in _BY_MASK:
        named["where"] = attended.where
    # Experts with a capacity share it between positions, too: true of them by construction.
    fields = {"severity": Severity.INFO} if blame is not None and is_router(blame.module) else {}
    return finding(
        "GG660",
        seen,
        likely=likely,
        step=watch.step,
        moment=Moment.BEFORE_STEP,
        evidence={"change": leak.change, "source": leak.source, "readers": leak.readers[:50]},
        **named,
        **fields,
    )


def _made_by(blame: FirstDifference, call: Attended) -> bool:
    """Whether the call is in the blamed module's own code, or in one of torch's layers that it is made of."""
    torchs = type(blame.module).__module__.startswith("torch.")
    return call.path == blame.path or (torchs and call.path.startswith(f"{blame.path}."))
