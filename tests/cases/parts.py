"""What the healthy loops share: a small network, its usual optimizer, and the usual step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def adam(model: nn.Module, lr: float = 3e-3, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr, **options)


def update(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
