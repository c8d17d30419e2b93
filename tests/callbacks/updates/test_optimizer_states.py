"""An optimizer's state that has become inf is named; healthy states are read only under suspicion, and never named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpt_guard.callbacks.updates import optimizer_states
from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def train(
    model: nn.Module, optimizer: Any, *, steps: int = 40, spike: tuple[int, float] = (-1, 1.0), reads: Any = "immediate"
) -> list[Finding]:
    with Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[], reads=reads) as guardian:
        for step in range(steps):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
            (loss * spike[1] if step == spike[0] else loss).backward()
            optimizer.step()
    return list(guardian.findings)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (torch.optim.Adam, "exp_avg_sq"),
        (torch.optim.AdamW, "exp_avg_sq"),
        (torch.optim.RMSprop, "square_avg"),
        (torch.optim.Adagrad, "sum"),
    ],
)
def test_squares_that_overflow_in_one_spike(kind: Any, key: str, reads: Any) -> None:
    model = net()
    (found,) = train(model, kind(model.parameters(), lr=1e-3), spike=(10, 1e25), reads=reads)
    assert (found.code, found.severity, found.parameter) == ("GG315", Severity.ERROR, "0.weight")
    assert found.step is not None
    assert 10 < found.step <= 12
    assert f"`{key}` of `0.weight` are inf or NaN" in found.seen
    assert found.evidence["count"] == 4
    assert found.causes[0].startswith("One batch had gradients above")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_state_that_was_inf_before_the_run(kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=1e-3)
    functional.mse_loss(model(torch.ones(1, 8)), torch.ones(1, 1)).backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"].fill_(float("inf"))
    (found,) = train(model, optimizer)
    assert (found.code, found.step) == ("GG315", 1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_state_that_is_finite_is_quiet_and_rarely_read(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[torch.optim.Optimizer] = []
    look = optimizer_states._not_finite

    def noted(watch: Any, optimizer: torch.optim.Optimizer) -> Any:
        looks.append(optimizer)
        return look(watch, optimizer)

    monkeypatch.setattr(optimizer_states, "_not_finite", noted)
    model = net()
    assert train(model, kind(model.parameters(), lr=1e-3), steps=60) == []
    assert looks == []
    # Large, and within the range.
    assert "GG315" not in [each.code for each in train(model, kind(model.parameters(), lr=1e-3), spike=(10, 1e17))]


def test_a_warm_up_from_zero_and_a_step_without_movement_are_quiet() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (step - 3) / 20))
    with Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[]) as guardian:
        for _ in range(40):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            schedule.step()
    assert list(guardian.findings) == []
