"""From readings to observations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_guard.hooks.ledger import Ledger
from gpt_guard.records import Moment, Observation
from gpt_guard.runtime.step_record import batch_size, complete, observe, put_lr

FACTS: dict[str, Any] = {"step": 3, "moment": Moment.BEFORE_STEP}


def seen(readings: dict[str, Any], after: list[str], applied: list[str] | None, names: Any = None) -> Observation:
    return observe(readings, after, applied, names, **FACTS)


def test_nothing_touched_the_gradients() -> None:
    observation = seen({"grad_norms": [3.0, 4.0], "loss.0": 1.0, "loss.1": 2.0, "mine": 7.0}, ["a", "b"], None)
    assert observation.grad_norm == observation.grad_norm_clipped == 5.0
    assert observation.clipped is False
    assert observation.loss == 3.0
    assert observation.grad_norms == {"a": 3.0, "b": 4.0}
    assert observation.readings == {"mine": 7.0}
    assert observation.step == 3


def test_clipped() -> None:
    observation = seen({"grad_norms": [3.0, 4.0], "grad_norms.applied": [0.6, 0.8]}, ["a", "b"], ["a", "b"])
    assert observation.grad_norm == 5.0
    assert observation.grad_norm_clipped == pytest.approx(1.0)
    assert observation.clipped is True


@pytest.mark.parametrize("factor", [1.0, 1.0 - 1e-6, 1.5, math.nan])
def test_rounding_growth_and_nan_are_no_clipping(factor: float) -> None:
    observation = seen({"grad_norms": [5.0], "grad_norms.applied": [5.0 * factor]}, ["a"], ["a"])
    assert observation.clipped is False


def test_gradients_that_were_never_seen_after_backward() -> None:
    observation = seen({"grad_norms.applied": [2.0]}, [], ["a"])
    assert observation.grad_norm == observation.grad_norm_clipped == 2.0
    assert observation.grad_norms == {"a": 2.0}


def test_gradients_that_were_gone_before_the_step() -> None:
    observation = seen({"grad_norms": [2.0], "grad_norms.applied": []}, ["a"], [])
    assert (observation.grad_norm, observation.grad_norm_clipped, observation.clipped) == (2.0, None, None)


def test_no_gradient_at_all() -> None:
    observation = seen({"grad_norms.applied": []}, [], [])
    assert (observation.grad_norm, observation.grad_norm_clipped, observation.clipped) == (None, None, None)
    assert observation.loss is None


def test_only_the_parameters_of_this_optimizer() -> None:
    observation = seen({"grad_norms": [3.0, 4.0]}, ["a", "b"], None, {"b"})
    assert observation.grad_norm == 4.0
    assert observation.grad_norms == {"b": 4.0}


def test_learning_rates_in_the_order_of_the_groups() -> None:
    ledger = Ledger()
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(11)]
    groups = [{"params": [each], "lr": place / 10} for place, each in enumerate(parameters)]
    groups[3]["lr"] = torch.tensor(0.3)
    put_lr(ledger, torch.optim.AdamW(groups))
    observation = seen(ledger.read()[None], [], None)
    assert observation.lr == pytest.approx([place / 10 for place in range(11)])


def test_an_optimizer_without_a_learning_rate() -> None:
    ledger = Ledger()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    del optimizer.param_groups[0]["lr"]
    put_lr(ledger, optimizer)
    assert math.isnan(ledger.read()[None]["lr.0"])


def test_completing() -> None:
    before = seen({"grad_norms": [2.0]}, ["a"], None)
    late = {"update_ratio": 0.01, "max_update": 0.5, "mine": 1.0}
    after = complete(before, late, 0.25)
    assert after.moment is Moment.AFTER_STEP
    assert (after.update_ratio, after.max_update, after.step_time) == (0.01, 0.5, 0.25)
    assert after.readings == {"mine": 1.0}
    assert (after.grad_norm, before.moment) == (2.0, Moment.BEFORE_STEP)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.zeros(4, 7, dtype=torch.long), (4, 28)),
        (torch.zeros(4, 7), (4, 0)),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), (4, 0)),
        (torch.zeros(5, dtype=torch.long), (5, 0)),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int32), "mask": torch.zeros(2, 3)}, (2, 6)),
        ((torch.tensor(0.5), torch.zeros(6, 2)), (6, 0)),
        (("text", None), (0, 0)),
        (None, (0, 0)),
    ],
)
def test_amounts(inputs: Tensor | Any, expected: tuple[int, int]) -> None:
    assert batch_size(inputs) == expected
