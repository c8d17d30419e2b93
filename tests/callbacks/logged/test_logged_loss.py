"""A finite number in the log for a step whose loss was NaN is told; a log that shows it is left alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.callbacks.logged.guards import LoggedLoss
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

Log = Callable[[Guardian, Tensor], None]
BAD = 4


def train(log: Log, *, bad: float = math.nan, reads: Any = "immediate", last: int = 8, **options: Any) -> list[Finding]:
    """A GradScaler leaves out the step whose loss is `bad`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    options = {"guards": [LoggedLoss()]} | options
    with Guardian(model, optimizer, summary=False, sinks=[], reads=reads, **options) as guardian:
        for turn in range(last):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * (bad if turn == BAD else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            log(guardian, loss.detach())
    return [found for found in guardian.findings if found.code == "GG111"]


def replaced(guardian: Guardian, loss: Tensor) -> None:
    guardian.log(loss=loss.nan_to_num(0.0, 0.0))


class Average:
    """The mean of the last few losses, without those that are not finite."""

    def __init__(self) -> None:
        self.last: deque[Tensor] = deque(maxlen=3)

    def __call__(self, guardian: Guardian, loss: Tensor) -> None:
        self.last.append(loss)
        guardian.log(train_loss=torch.stack([*self.last]).nanmean())


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_replaced_before_it_is_logged(bad: float, reads: str) -> None:
    (found,) = train(replaced, bad=bad, reads=reads)
    assert found.step == BAD
    assert found.evidence["logged"] == {"loss": 0.0}
    assert f"loss=0 was given to guardian.log(), which is finite; the loss that backward() saw in it was {bad}" in (
        found.seen.replace("+inf", "inf").replace("NaN", "nan")
    )
    assert "nan_to_num" in found.causes[0]


def test_an_average_that_leaves_it_out() -> None:
    (found,) = train(Average())
    assert found.step == BAD
    assert "train_loss=" in found.seen


class Frozen:
    """A running average that is left as it is, and logged again, where the loss is not finite."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, guardian: Guardian, loss: Tensor) -> None:
        if loss.isfinite():
            self.mean = 0.9 * self.mean + 0.1 * float(loss)
        guardian.log(loss=self.mean)


def test_an_average_that_stands_still() -> None:
    (found,) = train(Frozen())
    assert found.step == BAD


def test_it_is_told_at_the_end_too() -> None:
    (found,) = train(replaced, last=BAD + 1)
    assert found.step == BAD


def test_the_default_guards_have_it_where_the_policy_lets_the_run_go_on() -> None:
    assert len(train(replaced, guards=default_guards(), policy={"GG1": "warn"})) == 1


def as_it_is(guardian: Guardian, loss: Tensor) -> None:
    guardian.log(loss=loss)


def finite_beside_it(guardian: Guardian, loss: Tensor) -> None:
    guardian.log(loss=loss, smooth_loss=loss.nan_to_num(0.0))


def other_numbers(guardian: Guardian, loss: Tensor) -> None:
    guardian.log(accuracy=torch.rand(()))


def only_when_finite(guardian: Guardian, loss: Tensor) -> None:
    if loss.isfinite():
        guardian.log(loss=loss)


@pytest.mark.parametrize("log", [as_it_is, finite_beside_it, other_numbers])
def test_a_log_that_hides_nothing_is_silent(log: Log) -> None:
    assert train(log) == []


@pytest.mark.parametrize("log", [replaced, Average(), Frozen()])
def test_finite_losses_are_silent(log: Log) -> None:
    assert train(log, bad=2.0) == []


def test_a_gap_in_the_log_is_no_finite_number() -> None:
    assert train(only_when_finite) == []
