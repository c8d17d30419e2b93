"""Put a model into evaluation mode for a while, and give every module its own mode back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has the mode it had, parts frozen on purpose included."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Through train() first: a model may do more there than set the flag (merge adapters, unfreeze statistics).
        if before[0][1]:
            model.train()
        for module, training in before:
            module.training = training
