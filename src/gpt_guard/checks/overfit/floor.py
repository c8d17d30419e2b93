"""How low the loss of one batch can get: where the same context is followed by different tokens, not to zero."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import Tensor

MOST_TOKENS = 200_000


@dataclass(frozen=True)
class Floor:
    """Entropies in nats per target that counts, and the best share of right guesses.

    `loss` is the floor for a model that sees all of the context. `bigram` is that of one that sees only the current
    token, `position` of one that knows where it is but not what stands there, `unigram` of one that knows neither:
    where a curve ends there, this is what the model has to go by.
    """

    loss: float
    accuracy: float
    bigram: float
    position: float
    unigram: float
    targets: int


def floor(x: Tensor, y: Tensor, *, ignore_index: int, causal: bool, shifts_inside: bool) -> Floor | None:
    """The floors of a batch of token ids `[B, T]`; None where there is nothing to count, or too much. Reads the batch.

    The context of position t is x[: t + 1] of its row, or the whole row and t for an encoder.
    """
    if x.dim() != 2 or x.shape != y.shape or x.is_floating_point() or not 0 < x.numel() <= MOST_TOKENS:
        return None
    full: dict[Hashable, Counter[int]] = defaultdict(Counter)
    current: dict[Hashable, Counter[int]] = defaultdict(Counter)
    place: dict[Hashable, Counter[int]] = defaultdict(Counter)
    nothing: Counter[int] = Counter()
    for row, targets in zip(x.tolist(), y.tolist(), strict=True):
        wanted = targets[1:] if shifts_inside else targets
        for position, (context, target) in enumerate(zip(_contexts(row, causal), wanted, strict=False)):
            if target != ignore_index:
                full[context][target] += 1
                current[row[position]][target] += 1
                place[position][target] += 1
                nothing[target] += 1
    total = nothing.total()
    if total == 0:
        return None
    return Floor(
        loss=sum(map(_nats, full.values())) / total,
        accuracy=sum(max(counts.values()) for counts in full.values()) / total,
        bigram=sum(map(_nats, current.values())) / total,
        position=sum(map(_nats, place.values())) / total,
        unigram=_nats(nothing) / total,
        targets=total,
    )


def _contexts(row: list[int], causal: bool) -> Iterator[Hashable]:
    """A short name for what is visible at each position: of a prefix, the hash of the shorter prefix and the token."""
    whole = tuple(row)
    prefix = 0
    for position, token in enumerate(row):
        prefix = hash((prefix, token))
        yield prefix if causal else (whole, position)


def _nats(counts: Counter[int]) -> float:
    """Entropy of the counts times their number, in nats."""
    total = counts.total()
    return -sum(count * math.log(count / total) for count in counts.values())
