"""The loss of a model that has not been trained, what it should be, and what makes the difference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.checks.forward import call
from gpt_guard.checks.output_layer import output_layer

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
_LARGE, _GROWN = 1.5, 2.0
"""Times the std of variance 1/width, and times the RMS 1 of a normalised state."""
_MOST_SCORES = 2**24
_MOST_POSITIONS = 128
"""Bounds on what is computed at once, for time and for memory: 64 MB of float32 logits."""


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


def first_loss(model: nn.Module, x: Tensor, y: Tensor, ignore_index: int, shift: int) -> FirstLoss | None:
    """Cross entropy of logits `[B, T, V]` against targets `shift` positions later; None if it is not finite.

    Reads the device. Call it in eval mode and without gradient.
    """
    logits = call(model, x).logits.float()
    logits, y = logits[:, : logits.size(1) - shift], y[:, shift:].long()
    counts = (y != ignore_index) & (y >= 0) & (y < logits.size(-1))
    logits, targets = logits[counts], y[counts]
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


def cut(x: Tensor, y: Tensor, vocab: int, longest: int | None) -> tuple[Tensor, Tensor]:
    """As much of a batch as is computed at once."""
    length = min(x.size(1), _MOST_POSITIONS, longest or x.size(1))
    rows = max(1, min(x.size(0), _MOST_SCORES // max(1, vocab * length)))
    return x[:rows, :length], y[:rows, :length]


def are_probabilities(logits: Tensor) -> bool:
    """True where each row lies between 0 and 1 and sums to 1: softmax has been applied. Reads the device."""
    values = logits.detach().float()
    tolerance = 16 * torch.finfo(logits.dtype).eps
    sums = (values.sum(-1) - 1).abs().max()
    return bool((values >= 0).all()) and float(sums) < tolerance * values.size(-1) ** 0.5


class Scale(NamedTuple):
    """What the size of the logits comes from: the output layer's std and width, and the RMS of what enters it."""

    std: float
    width: int
    entering: float | None
    tied: bool

    @property
    def words(self) -> str:
        """In one sentence."""
        entering = f", what enters it has an RMS of {self.entering:.3g}" if self.entering is not None else ""
        tied = ", tied to the embedding" if self.tied else ""
        return f"The output layer's weights have a std of {self.std:.3g} at width {self.width}{tied}{entering}."

    @property
    def likely(self) -> list[str]:
        """Cause keys of GG650, the likeliest first."""
        large = self.std * self.width**0.5 > _LARGE
        grown = ["no_final_norm"] if self.entering is not None and self.entering > _GROWN else []
        return [*(["tied_std" if self.tied else "head_std"] if large else []), *grown, "scale"]


def scale_of_logits(model: nn.Module, x: Tensor, vocab: int) -> Scale | None:
    """Look at the output layer while the model runs once; None if no weight `[V, C]` is found."""
    weight, entering = output_layer(model, x, vocab)
    if weight is None:
        return None
    tied = any(isinstance(module, nn.Embedding) and module.weight is weight for module in model.modules())
    return Scale(float(weight.detach().float().std()), weight.size(1), entering, tied)
