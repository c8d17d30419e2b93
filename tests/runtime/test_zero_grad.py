"""Where gradients are cleared is the user's business: a step's loss is what its gradient is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.guardian import Guardian


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6)
    return x, x[:, :3].argmax(1)


def zero_before_forward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def zero_before_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    return loss


def zero_after_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def zero_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    model.zero_grad()
    return zero_after_step(model, optimizer)


def zero_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = zero_after_step(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = None
    return loss


def dropped_batch_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    x, y = batch()
    (1e6 * F.cross_entropy(model(x), y)).backward()
    return zero_before_forward(model, optimizer)


def dropped_batch_zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    x, y = batch()
    (1e6 * F.cross_entropy(model(x), y)).backward()
    return zero_before_backward(model, optimizer)


ZEROING = [
    zero_before_forward,
    zero_before_backward,
    zero_after_step,
    zero_the_model,
    zero_by_hand,
    dropped_batch_first,
    dropped_batch_zeroed_in_place,
]


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("step", ZEROING)
def test_zero_grad_in_any_legal_place(step: Callable[..., Tensor], reads: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        for _ in range(3):
            loss = step(model, optimizer)
    assert guardian.latest is not None
    assert guardian.latest.loss == pytest.approx(loss.item())
    assert guardian.latest.micro_batches == 1
    assert guardian.step == 3
