"""A loss that is the same number in every step, though weights move and batches differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, ParamDeltaProbe
from gpt_guard.records import Finding

WIDTH = 6
Loss = Callable[[nn.Module, Tensor], Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))


def run(
    loss: Loss, *, lr: float = 1e-2, steps: int = 12, same: bool = False, model: Any = None, reads: Any = "immediate"
) -> list[Finding]:
    torch.manual_seed(0)
    model = net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x = torch.randn(16, WIDTH)
    with Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[], reads=reads) as guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, x if same else torch.randn(16, WIDTH)).backward()
            optimizer.step()
    return [found for found in guardian.findings if found.code == "GG629"]


def preference(reference: nn.Module | None = None) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = (reference or model)(x)
        now = model(x)
        ahead: Tensor = 0.1 * ((now[:, 0] - fixed[:, 0]) - (now[:, 1] - fixed[:, 1]))
        return -F.logsigmoid(ahead).mean()

    return loss


def distilled(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = model(x)
    apart: Tensor = model(x) - teacher
    return apart.sum(1).mean() + 0.7310586


def normalised(model: nn.Module, x: Tensor) -> Tensor:
    raw: Tensor = model(x).square().mean()
    return 0.3333333 * raw / raw.detach()


def regression(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x)[:, 0], x.sum(1))


def hinge(model: nn.Module, x: Tensor) -> Tensor:
    raw: Tensor = model(x).mean()
    return raw - raw.detach() + 2.0


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize(("loss", "calls"), [(preference(), 1), (distilled, 1), (normalised, 0)])
def test_it_is_told_after_five_equal_losses(loss: Loss, calls: int, reads: Any) -> None:
    (found,) = run(loss, reads=reads)
    assert found.step in (4, 5)
    assert found.evidence["without_gradients"] == calls
    assert ("one object" in found.causes[0]) == bool(calls)


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: run(preference(copy.deepcopy(net()))),
        lambda: run(regression),
        lambda: run(regression, same=True, lr=1e-9),
        lambda: run(normalised, same=True),
        lambda: run(hinge),
        lambda: run(preference(), lr=0.0),
        lambda: run(lambda model, x: normalised(model, x).bfloat16()),
    ],
)
def test_a_loss_that_moves_or_cannot_is_silent(healthy: Callable[[], list[Finding]]) -> None:
    assert healthy() == []


def test_a_head_that_begins_at_zero_with_a_tiny_lr_is_silent() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        model.get_parameter("2.weight").zero_()
        model.get_parameter("2.bias").zero_()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(module(x), x[:, :4].argmax(1))

    assert run(loss, lr=1e-8, model=model) == []
