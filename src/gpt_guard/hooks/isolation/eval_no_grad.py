"""A model in eval mode and without gradient for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradient; each module gets its own mode back, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
