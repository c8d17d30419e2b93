"""What a tensor of scores is, told from its values: probabilities, log-probabilities, or neither."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOST_ROWS = 1024
"""More rows than this say nothing more about what kind of scores they are."""
_FEWEST_ROWS = 16
_MOST_SCORES = 2**22
"""Fewer rows of a large vocabulary: 16 MB of float32 are looked at."""


def are_probabilities(scores: Tensor) -> bool:
    """True where each row lies between 0 and 1 and sums to 1: softmax has been applied. Reads the device."""
    values = scores.detach().float()
    sums = (values.sum(-1) - 1).abs().max()
    return bool((values >= 0).all()) and float(sums) < _tolerance(scores)


def are_log_probabilities(scores: Tensor) -> bool:
    """True where the exponentials of each row sum to 1, or nearly: of log(p + eps) they sum to a little more."""
    sums = scores.detach().float().logsumexp(-1).abs().max()
    # The logarithms that matter are about as large as log C, and are rounded in proportion.
    return float(sums) < max(1e-2, _tolerance(scores) * (1 + math.log(scores.size(-1))))


def _tolerance(scores: Tensor) -> float:
    """What rounding does to a row that sums to 1: each term in its own dtype, the sum in float32."""
    kind, exact, classes = torch.finfo(scores.dtype), torch.finfo(torch.float32), scores.size(-1)
    return float(4 * kind.eps + classes * kind.smallest_normal * kind.eps + 16 * exact.eps * classes**0.5)


def score_rows(scores: Tensor, dim: int, counted: Tensor | None = None) -> Tensor:
    """At most MOST_ROWS rows `[n, C]` of scores with classes along `dim`; of those that `counted` marks, if any are.

    `counted` has the shape of the scores without `dim`. Copies no more than it needs.
    """
    values = scores.detach()
    most = max(_FEWEST_ROWS, min(MOST_ROWS, _MOST_SCORES // max(1, values.size(dim))))
    if values.dim() > 2:
        positions = values.numel() // max(1, values.size(0) * values.size(dim))
        samples = max(1, most // max(1, positions))
        values, counted = values[:samples], None if counted is None else counted[:samples]
    rows = values.movedim(dim, -1).reshape(-1, values.size(dim))
    if counted is not None and counted.numel() == rows.size(0) and bool(counted.any()):
        rows = rows[counted.reshape(-1).nonzero()[:most, 0]]
    return rows[:most]
