from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


def watched(make: Any, steps: int = 60, warm_up: bool = False) -> list[Finding]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    peak = optimizer.param_groups[0]["lr"]
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[])
    with guardian:
        for step in range(steps):
            if warm_up:
                optimizer.param_groups[0]["lr"] = peak * min(1.0, step / 20)
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return list(guardian.findings)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=100.0)


@pytest.mark.parametrize(
    ("make", "product", "severity"),
    [
        (adamw, 1.0, Severity.ERROR),
        (lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=10.0), 0.5, Severity.WARNING),
        (lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=20.0, decoupled_weight_decay=True), 0.2, Severity.WARNING),
    ],
)
def test_decay_that_takes_the_weights_away_is_said_at_the_first_step(
    make: Any, product: float, severity: Severity
) -> None:
    (found,) = watched(make)
    assert (found.code, found.step, found.severity) == ("GG312", 0, severity)
    assert found.causes[0].startswith("weight_decay is far too high")
    assert found.evidence["product"] == pytest.approx(product)


def test_within_a_warm_up_it_is_said_when_the_product_is_large() -> None:
    (found,) = watched(adamw, warm_up=True)
    assert found.code == "GG312"
    assert found.step == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=5e-4),
        # Through Adam's normalised gradient, decay moves no weight by more than lr.
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=20.0),
    ],
)
def test_usual_decay_is_quiet(make: Any) -> None:
    assert watched(make) == []
