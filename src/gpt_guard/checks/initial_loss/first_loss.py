"""The loss of a model that has not been trained, what it should be, and what makes the difference."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from gpt_guard.callbacks.losses.reduction import FirstLoss, loss_parts
from gpt_guard.checks.initial_loss.output_layer import output_layer
from gpt_guard.checks.runner.forward import call

_LARGE, _GROWN = 1.5, 2.0
"""Times the std of variance 1/width, and times the RMS 1 of a normalised state."""
_MOST_SCORES = 2**24
_MOST_POSITIONS = 128
"""Bounds on what is computed at once, for time and for memory: 64 MB of float32 logits."""


def first_loss(model: nn.Module, x: Tensor, y: Tensor, ignore_index: int, shift: int) -> FirstLoss | None:
    """Cross entropy of logits `[B, T, V]` against targets `shift` positions later; None if it is not finite.

    Reads the device. Call it in eval mode and without gradient.
    """
    logits = call(model, x).logits.float()
    logits, y = logits[:, : logits.size(1) - shift], y[:, shift:].long()
    counts = (y != ignore_index) & (y >= 0) & (y < logits.size(-1))
    return loss_parts(logits[counts], y[counts])


def cut(x: Tensor, y: Tensor, vocab: int, longest: int | None) -> tuple[Tensor, Tensor]:
    """As much of a batch as is computed at once."""
    length = min(x.size(1), _MOST_POSITIONS, longest or x.size(1))
    rows = max(1, min(x.size(0), _MOST_SCORES // max(1, vocab * length)))
    return x[:rows, :length], y[:rows, :length]


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
