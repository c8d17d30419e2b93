"""Put a model into evaluation mode for a while, and give every module its own mode back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn


class Marked(Protocol):
    """Whoever wants to know that what happens inside is evaluation."""

    evaluating: bool


@contextmanager
def evaluation_mode(model: nn.Module, mark: Marked | None = None) -> Iterator[None]:
    """Eval mode and no-grad inside; afterwards each module has the mode it had, parts frozen on purpose included."""
    before = [(module, module.training) for module in model.modules()]
    marked = mark.evaluating if mark is not None else False
    if mark is not None:
        mark.evaluating = True
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        # Through train() first: a model may do more there than set the flag (merge adapters, unfreeze statistics).
        if before[0][1]:
            model.train()
        for module, training in before:
            module.training = training
        if mark is not None:
            mark.evaluating = marked
