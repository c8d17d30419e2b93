"""The loss of a model that has not been trained, against what it should be: the mean cross entropy and its parts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ALLOWED_ABOVE = 1.0
"""Nats above log V. Logits of standard deviation s cost s**2 / 2 (the mean of a log-normal distribution); an output
layer of variance 1/width (LeCun et al. 1998) on normalised states makes s = 1, half a nat. Twice that is allowed."""
ALLOWED_BELOW = 0.5
"""Nats below log V, and never more than half of log V. Weights of a tied embedding favour the current token, which is
the next one now and then: a few tenths of a nat in text."""
_SAMPLING = 4.0
"""Standard errors that a mean over few positions may be off."""
_IN_PLAY = 50.0
"""Scores so far below the largest are masked: rows of a padded vocabulary, set to -inf or -1e9."""


class FirstLoss(NamedTuple):
    """Mean cross entropy and what it is made of, in nats.

    `even` is the loss that these logits have with targets drawn evenly, `prior` the loss of their mean over all
    positions, which knows frequencies but not the input; `spread` is the standard deviation over the classes.
    """

    loss: float
    even: float
    prior: float
    spread: float
    positions: int
    log_vocab: float

    @property
    def sampling(self) -> float:
        """How far the mean may be off because the positions are few."""
        return _SAMPLING * self.spread / math.sqrt(max(1, self.positions))

    @property
    def too_high(self) -> bool:
        """True where the loss is above what chance explains, or the logits are too large for any targets."""
        return max(self.loss - self.sampling, self.even) > self.log_vocab + ALLOWED_ABOVE

    @property
    def highest(self) -> float:
        """Above this the logits are too large, or wrong."""
        return self.log_vocab + ALLOWED_ABOVE + self.sampling

    @property
    def lowest(self) -> float:
        """Below this the model knows what it cannot know."""
        return self.log_vocab - min(ALLOWED_BELOW + self.sampling, 0.5 * self.log_vocab)


def loss_parts(logits: Tensor, targets: Tensor) -> FirstLoss | None:
    """Cross entropy of logits `[N, V]` against ids `[N]`, all of which count; None if it is not finite.

    Reads the device.
    """
    if not targets.numel() or not bool(logits.isfinite().any(-1).all()):
        return None
    normaliser = logits.logsumexp(-1)
    in_play = logits > logits.amax(-1, keepdim=True) - _IN_PLAY
    even, spread = _even(logits, in_play)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    prior = logits.mean(0, keepdim=True).log_softmax(-1)[0]
    values = (
        (normaliser - chosen).mean(),
        (normaliser - even).mean(),
        -prior[targets].mean(),
        spread.mean(),
    )
    loss, of_even, of_mean, std = torch.stack(values).tolist()
    if not math.isfinite(loss):
        return None
    return FirstLoss(loss, of_even, of_mean, std, targets.numel(), math.log(logits.size(-1)))


def _even(logits: Tensor, in_play: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row's scores that are in play."""
    count = in_play.sum(-1).clamp_min(1)
    mean = logits.masked_fill(~in_play, 0.0).sum(-1) / count
    apart = (logits - mean.unsqueeze(-1)).masked_fill(~in_play, 0.0)
    return mean, (apart.square().sum(-1) / count).sqrt()
