"""The ledger: scalars in, one read out, under the label of their moment."""

from __future__ import annotations

import math

import pytest
import torch

from gpt_guard.hooks.ledger import Ledger


def test_scalars_vectors_and_plain_floats_come_back_by_label_and_name() -> None:
    ledger = Ledger()
    ledger.label = "before"
    ledger.put("loss", torch.tensor(2.5, requires_grad=True))
    ledger.put("norms", torch.tensor([1.0, math.inf]))
    ledger.put("lr", 0.1)
    ledger.label = "after"
    ledger.put("loss", torch.tensor(math.nan, dtype=torch.float64))
    ledger.put("list", [1.0, 2.0])
    ledger.put("empty", torch.zeros(0))
    assert len(ledger) == 6
    found = ledger.read()
    assert found["before"] == {"loss": 2.5, "norms": [1.0, math.inf], "lr": 0.1}
    assert math.isnan(found["after"].pop("loss"))
    assert found["after"] == {"list": [1.0, 2.0], "empty": []}
    assert len(ledger) == 0
    assert ledger.read() == {}


def test_what_is_put_later_under_a_name_counts() -> None:
    ledger = Ledger()
    ledger.put("lr", 1.0)
    ledger.put("lr", 2.0)
    assert ledger.read() == {None: {"lr": 2.0}}


def test_a_value_is_read_as_it_is_at_the_read() -> None:
    """A tensor waits by reference: what must not change has to be measured into a tensor of its own."""
    ledger, value = Ledger(), torch.tensor(1.0)
    ledger.put("value", value)
    value.fill_(2.0)
    assert ledger.read() == {None: {"value": 2.0}}


def test_dropping_by_prefix() -> None:
    ledger = Ledger()
    for name in ("loss.0", "loss.1", "lossless", "lr"):
        ledger.put(name, 1.0)
    ledger.drop("loss.")
    assert list(ledger.read()[None]) == ["lossless", "lr"]
    ledger.put("lr", 1.0)
    ledger.clear()
    assert ledger.read() == {}


def test_it_holds_no_graph() -> None:
    ledger = Ledger()
    ledger.put("loss", (torch.ones((), requires_grad=True) * 2).exp())
    (value,) = ledger._waiting[None].values()
    assert value.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_every_dtype_comes_back_as_a_number(dtype: torch.dtype) -> None:
    ledger = Ledger()
    ledger.put("value", torch.ones((), dtype=dtype))
    assert ledger.read() == {None: {"value": 1}}
