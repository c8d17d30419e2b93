"""A setting under a name that the optimizer does not read; keys of schedulers and of other optimizers are silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard import Finding, Guardian, LRTracker, Severity

Write = Callable[[torch.optim.Optimizer, int], None]


def said(write: Write, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if make is None else make(model.parameters())
    with Guardian(model, optimizer, guards=[LRTracker()], sinks=[], summary=False) as guardian:
        for step in range(8):
            write(optimizer, step)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return [each for each in guardian.findings if each.code == "GG413"]


def later(key: str, value: Any) -> Write:
    def write(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step >= 4:
            optimizer.param_groups[0][key] = value

    return write


def nothing(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The groups stay as they are."""


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("LR", "lr"),
        ("wd", "weight_decay"),
        ("weight_deacy", "weight_decay"),
        ("epsilon", "eps"),
    ],
)
def test_a_key_that_is_written_in_mid_run_is_told_at_its_step(key: str, meant: str) -> None:
    (found,) = said(later(key, 0.5))
    assert (found.code, found.severity, found.step) == ("GG413", Severity.WARNING, 4)
    assert f"has `{key}` = 0.5, which AdamW does not read; its `{meant}` is" in found.seen


def test_one_that_the_constructor_was_given_is_told_at_the_first_step() -> None:
    (found,) = said(nothing, lambda own: torch.optim.SGD([{"params": list(own), "learning_rate": 1e-4}], lr=0.1))
    assert found.step == 0
    assert "`lr` is 0.1" in found.seen


class Own(torch.optim.SGD):
    """Of another library: what it reads is its own business."""


@pytest.mark.parametrize("key", ["initial_lr", "swa_lr", "max_lr", "min_lr", "lr_scale", "name", "layer", "decay_rate"])
def test_keys_of_schedulers_and_of_ones_own_bookkeeping_are_silent(key: str) -> None:
    assert said(later(key, 0.5)) == []


def test_another_optimizer_may_read_it() -> None:
    assert said(later("learning_rate", 0.5), lambda own: Own(own, lr=0.1)) == []


def test_a_schedulers_own_keys_are_silent() -> None:
    def make(own: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=100)
        return optimizer

    assert said(nothing, make) == []
