"""Gradients that vanish in float16 without a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import AutocastUse, Guardian, ParamDeltaProbe
from gpt_guard.records import Finding


class Text(nn.Module):
    """An embedding of which few rows occur, and layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layers(self.table(ids))
        return out


def run(
    scale: float,
    dtype: torch.dtype = torch.float16,
    *,
    model: nn.Module | None = None,
    scaler: bool = False,
    reads: Any = "immediate",
    guards: list[Any] | None = None,
    steps: int = 4,
) -> list[Finding]:
    torch.manual_seed(0)
    model = Text() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaling = torch.amp.GradScaler("cpu", enabled=scaler)
    kept = [AutocastUse()] if guards is None else guards
    with Guardian(model, optimizer, guards=kept, sinks=[], reads=reads) as guardian:
        for _ in range(steps):
            ids = torch.randint(8, (64,))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                scores = model(ids)
            loss = scale * F.cross_entropy(scores.float(), ids % 4)
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
    return list(guardian.findings)


def half_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).half()


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_a_small_loss_under_autocast_is_told_with_the_weight(reads: Any) -> None:
    (found,) = run(1e-5, reads=reads)
    assert (found.code, found.step, found.module) == ("GG512", 0, "layers.2")
    assert "GradScaler" in found.causes[0]


def test_a_model_in_half_precision_is_told_too() -> None:
    (found,) = run(1e-5, model=half_model())
    assert (found.code, found.step) == ("GG512", 0)


def test_a_scaler_that_is_disabled_does_not_scale() -> None:
    assert [each.code for each in run(1e-5, scaler=False)] == ["GG512"]


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: run(1e-5, scaler=True),
        lambda: run(1e-5, torch.bfloat16),
        lambda: run(1.0),
        lambda: run(1e-2),
    ],
)
def test_a_scaler_bfloat16_and_a_loss_of_usual_size_are_silent(healthy: Callable[[], list[Finding]]) -> None:
    assert healthy() == []


def test_dead_units_are_no_underflow() -> None:
    model = Text()
    with torch.no_grad():
        for name in ("layers.0.bias", "layers.2.bias"):
            model.get_parameter(name)[:24] = -50.0
    assert run(1.0, model=model) == []


def test_a_gradient_that_is_zero_throughout_is_put_down_to_it() -> None:
    found = run(1e-5, guards=[AutocastUse(), ParamDeltaProbe()], steps=26)
    zero = next(each for each in found if each.code == "GG304")
    assert "float16" in zero.causes[0]
