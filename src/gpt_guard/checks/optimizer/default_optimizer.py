"""An optimizer for a model that came without one: AdamW at lr 1e-3."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from gpt_guard.checks.gradients.backward import trainable

LR = 1e-3
"""What nearly every small GPT trains with; large ones take a third to a tenth of it."""


def stand_in(model: nn.Module, lr: float = LR) -> Optimizer:
    """AdamW over what is trainable. Embeddings give dense gradients from now on, for AdamW takes no sparse ones.

    Changes the attribute `sparse` of modules that have it set: keep the model's state. Raises ValueError for a model
    without trainable parameters, as torch does.
    """
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            setattr(module, "sparse", False)  # noqa: B010 - the attribute is torch's, and typed as a tensor here
    return torch.optim.AdamW(trainable(model).values(), lr=lr)
