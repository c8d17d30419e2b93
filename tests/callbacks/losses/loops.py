"""Loops whose losses are looked at: two heads on one body, one squared error in a far too small unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.losses.guard import LossInputs
from gpt_guard.guardian import Guardian

from ...cases.loss_inputs import CASES
from ...cases.loss_parts import features
from ...cases.loss_sums import Heads

BY_NAME = {case.name: case for case in CASES}


def two_heads(model: Heads, hidden_hook: Callable[[Tensor], None] | None = None) -> Tensor:
    x, y = features()
    hidden = model.body(x)
    if hidden_hook is not None:
        hidden_hook(hidden)
    return F.mse_loss(model.number(hidden).squeeze(-1), 1e5 * (2 + x.sum(1))) + F.cross_entropy(model.kind(hidden), y)


def alone(model: nn.Module, loss_of: Callable[[], Tensor], guards: Sequence[Guard] | None = None) -> Guardian:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[LossInputs()] if guards is None else guards, sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()
    return guardian


def codes(guardian: Guardian) -> list[str]:
    return [found.code for found in guardian.findings]
