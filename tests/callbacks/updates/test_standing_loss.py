"""Steps that are a large part of the weights as long as the loss stands still, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, ParamDeltaProbe
from gpt_guard.records import Finding

WIDTH, CLASSES = 16, 8


def trained(
    lr: Callable[[int], float],
    labels: Callable[[Tensor], Tensor],
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    steps: int = 40,
) -> list[Finding]:
    """A model whose matrices are brought back to their norm after each step, so that they cannot grow out of it."""
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = optimizer_of(model.parameters())
    norms = [each.detach().norm() for each in model.parameters()]
    with Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[], summary=False) as guardian:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr(step)
            x = torch.randn(64, WIDTH)
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels(x)).backward()
            optimizer.step()
            with torch.no_grad():
                for each, norm in zip(model.parameters(), norms, strict=True):
                    each.mul_(norm / each.norm())
    return list(guardian.findings)


def learnable(x: Tensor) -> Tensor:
    return x[:, :CLASSES].argmax(1)


def unlearnable(x: Tensor) -> Tensor:
    return torch.randint(CLASSES, (len(x),))


@pytest.mark.parametrize(
    ("lr", "optimizer_of"),
    [
        (0.1, lambda p: torch.optim.NAdam(p, betas=(0.5, 0.999))),
        (0.09, lambda p: torch.optim.Adam(p, betas=(0.0, 0.999))),
        (0.09, lambda p: torch.optim.AdamW(p, betas=(0.0, 0.99))),
    ],
)
def test_large_steps_while_the_loss_stands_still(
    lr: float, optimizer_of: Callable[[Any], torch.optim.Optimizer]
) -> None:
    (found,) = trained(lambda _: lr, unlearnable, optimizer_of)
    assert (found.code, found.title) == (
        "GG308",
        "Steps change a large part of the weights while the loss stands still",
    )
    assert found.step is not None
    assert 19 <= found.step <= 25
    assert 0.4 < float(str(found.evidence["ratio"])) < 1.0
    assert "the loss went from" in found.seen


@pytest.mark.parametrize(
    ("lr", "labels"),
    [
        # Small steps, and a loss that cannot fall.
        (lambda _: 1e-3, unlearnable),
        (lambda _: 0.02, unlearnable),
        (lambda _: 0.02, learnable),
        # Large only in the beginning.
        (lambda step: 0.1 if step < 8 else 5e-3, unlearnable),
    ],
)
def test_smaller_steps_are_left_alone(lr: Callable[[int], float], labels: Callable[[Tensor], Tensor]) -> None:
    assert trained(lr, labels) == []


def test_a_resumed_run_judges_by_what_it_has_seen() -> None:
    probe = ParamDeltaProbe()
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[probe], sinks=[], summary=False):
        for _ in range(5):
            x = torch.randn(8, WIDTH)
            optimizer.zero_grad()
            F.cross_entropy(model(x), learnable(x)).backward()
            optimizer.step()
    state = probe.state_dict()
    again = ParamDeltaProbe()
    again.load_state_dict(state)
    assert len(state["ratios"]["0"]["losses"]) == 5
    assert again.state_dict()["ratios"] == state["ratios"]
