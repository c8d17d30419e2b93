"""Does padding change what a model says about real tokens?"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.perturb import repeatable
from gpt_guard.hooks.isolation.compare import across_shapes, difference

_MASK = "attention_mask"
"""The argument that says by 1 which tokens are real (Hugging Face); others exist in either sense: none is guessed."""


class Padding(NamedTuple):
    """How far the logits of real tokens move when padding stands behind them, and how far rounding may move them."""

    change: float
    allowed: float
    real: int
    padding: int
    mask_given: bool


def change_padding(model: nn.Module, x: Tensor, vocab: int, pad: int, seed: int) -> Padding:
    """Compare rows alone with the same rows padded to twice their length, by the ids and an `attention_mask` if taken.

    Reads the device. Call it in eval mode and without gradient.
    """
    length = max(1, x.size(1) // 2)
    real = torch.where(x == pad, (x + 1) % vocab, x)[:, :length]
    padded = torch.cat([real, torch.full_like(x[:, length:], pad)], 1)
    mask_given = _MASK in inspect.signature(unwrap(model).forward).parameters
    forward = repeatable(_Masked(model, pad) if mask_given else model, seed)
    alone, behind = forward(real), forward(padded)[:, :length]
    change = float(difference(alone, behind).max())
    return Padding(change, across_shapes(alone), length, x.size(1) - length, mask_given)


class _Masked(nn.Module):
    """A model that is told which tokens are real."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        super().__init__()
        self.model, self.pad = model, pad

    def forward(self, x: Tensor) -> Any:
        return self.model(x, attention_mask=(x != self.pad).long())
