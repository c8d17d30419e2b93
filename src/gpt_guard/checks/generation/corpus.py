"""The corpus that generated text is compared with: its pairs of tokens, a bigram model of them, and held-out rows.

A model has learned more than which token follows which where its loss on held-out text is below the bigram model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import logits_of

FEWEST = 5_000
MOST = 300_000
"""Ids of the corpus that are looked at: fewer say nothing about words and pairs, more change little and take time."""
HELD_OUT = 20_000
WINDOWS = 100
"""Windows of the corpus that are measured for comparison."""
COPIES = 0.1
"""Nats against its own input below which a model copies what it reads: a probability of 0.9."""
CLEARLY = 0.95
"""A loss below this share of the bigram's counts as clearly below."""
_ROWS = 64


@dataclass(frozen=True)
class Corpus:
    """Ids to compare with: what the model may have seen, and a part that stands for text it has not."""

    seen: Tensor
    held_out: Tensor


def corpus(subject: Subject) -> Corpus | None:
    """The training and validation ids, else those of the user's own batches; None where there are too few."""
    train = subject.data.get("train", next(iter(subject.data.values()), None))
    if train is None and subject.batches is not None:
        train = torch.cat([torch.zeros(0, dtype=torch.long), *_from_batches(subject)])
    if train is None or train.is_floating_point() or train.numel() < FEWEST:
        return None
    ids = train.reshape(-1)[:MOST].cpu().long()
    val = subject.data.get("val", subject.data.get("test"))
    if val is not None and val is not train and val.numel() >= FEWEST // 2:
        return Corpus(ids, val.reshape(-1)[:HELD_OUT].cpu().long())
    cut = int(0.9 * ids.numel())
    return Corpus(ids[:cut], ids[cut:][:HELD_OUT])


def windows(ids: Tensor, length: int, count: int = WINDOWS) -> Tensor:
    """Rows `[W, length]`, spread evenly over 1-D token ids; none where these are too few."""
    if ids.numel() < length or length < 1:
        return ids.new_zeros(0, max(length, 1))
    starts = torch.linspace(0, ids.numel() - length, min(count, ids.numel() - length + 1)).long()
    return ids[starts[:, None] + torch.arange(length)]


class TokenPairs:
    """The pairs of neighbouring tokens in a corpus."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._seen = torch.unique(self._codes(ids.long()))

    def unseen(self, rows: Tensor) -> float | None:
        """The share of pairs in rows `[B, T]` that the corpus never has; None where there is no pair."""
        codes = self._codes(rows.long())
        if codes.numel() == 0:
            return None
        return 1.0 - float(torch.isin(codes, self._seen).float().mean())

    def _codes(self, ids: Tensor) -> Tensor:
        return (ids[..., :-1] * self._vocab + ids[..., 1:]).flatten()


def bigram_loss(text: Corpus, vocab_size: int) -> float:
    """Nats per token of a bigram model on the held-out part, mixed with unigrams as Witten and Bell (1991) do.

    It knows which token follows which and nothing else; a model at this loss makes no use of its context.
    """
    seen, held = text.seen, text.held_out
    singles = torch.bincount(seen, minlength=vocab_size).double()
    single = (singles + 1) / (singles.sum() + vocab_size)
    codes, counts = torch.unique(seen[:-1] * vocab_size + seen[1:], return_counts=True)
    followers = torch.bincount(codes // vocab_size, minlength=vocab_size).double()
    before, after = held[:-1], held[1:]
    wanted = before * vocab_size + after
    place = torch.searchsorted(codes, wanted).clamp_max(len(codes) - 1)
    count = torch.where(codes[place] == wanted, counts[place], 0).double()
    kinds, total = followers[before], singles[before]
    probability = (count + kinds * single[after]) / (total + kinds).clamp_min(1.0)
    unseen = (total + kinds) == 0
    probability = torch.where(unseen, single[after], probability)
    return float(-probability.clamp_min(1e-12).log().mean())


def bigram_text(ids: Tensor, length: int, count: int, seed: int) -> Tensor:
    """Rows `[count, length]` in which each token is one that followed the token before it somewhere in the corpus."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.sort(ids[:-1], stable=True)
    places, sorted_ids = order.indices, order.values
    now = ids[torch.randint(ids.numel() - 1, (count,), generator=generator)]
    rows = [now]
    for _ in range(length - 1):
        low = torch.searchsorted(sorted_ids, now, right=False)
        high = torch.searchsorted(sorted_ids, now, right=True)
        span = (high - low).clamp_min(1)
        pick = (low + (torch.rand(count, generator=generator) * span).long()).clamp_max(places.numel() - 1)
        now = ids[places[pick] + 1]
        rows.append(now)
    return torch.stack(rows, dim=1)


@dataclass(frozen=True)
class HeldOutLosses:
    """Nats per token on held-out rows: inside them, at their last position, and against the input itself."""

    inside: float
    last: float
    copied: float

    @property
    def falls_at_the_end(self) -> bool:
        """Whether the last position is so much worse that chance cannot explain it: over 64 rows it is good to 0.3."""
        return self.last > 2 * self.inside + 1.0


def held_out_losses(model: nn.Module, text: Corpus, limit: int | None) -> HeldOutLosses:
    """The model's losses on rows of the held-out part; eval mode and no gradient are the caller's.

    Positions of the first quarter of a row are left out, since they have little context.
    """
    length = min(limit or 64, 256, text.held_out.numel() - 1)
    starts = torch.linspace(0, text.held_out.numel() - length - 1, _ROWS).long()
    rows = text.held_out[starts[:, None] + torch.arange(length + 1)]
    first = next(iter(model.parameters()), None)
    rows = rows.to(first.device) if first is not None else rows
    logits = logits_of(model, rows[:, :-1]).float()
    each = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    copied = F.cross_entropy(logits.transpose(1, 2), rows[:, :-1])
    skip = length // 4
    inside = each[:, skip:-1] if length > 2 else each
    return HeldOutLosses(float(inside.mean()), float(each[:, -1].mean()), float(copied))


def _from_batches(subject: Subject) -> Iterator[Tensor]:
    taken = 0
    assert subject.batches is not None, "corpus() asks first"
    for x, _ in islice(subject.batches(), 200):
        yield x.reshape(-1).cpu().long()
        taken += x.numel()
        if taken >= MOST:
            return
