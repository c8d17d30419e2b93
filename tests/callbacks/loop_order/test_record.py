"""What is written down of a loop: in order, bounded, folded where it repeats, and of the loop's own thread alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gpt_guard.callbacks.loop_order.cycle import folded
from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.callbacks.loop_order.record import (
    LoopRecorder,
    cleared,
    gradient_state,
    versions,
)
from gpt_guard.guardian import Guardian

from .order_loops import cross_entropy, run


def test_the_state_of_gradients_tells_what_was_done_to_them() -> None:
    layer = nn.Linear(2, 1)
    parameters = list(layer.parameters())
    empty = gradient_state(parameters)
    layer(torch.ones(1, 2)).sum().backward()
    first = gradient_state(parameters)
    layer(torch.ones(1, 2)).sum().backward()
    second = gradient_state(parameters)
    assert len({empty, first, second}) == 3
    assert gradient_state(parameters) == second
    layer.zero_grad()
    assert cleared(second, gradient_state(parameters))
    assert not cleared(empty, second)
    assert not cleared(empty, empty)


def test_a_change_of_weights_in_place_is_counted() -> None:
    layer = nn.Linear(2, 1)
    parameters = list(layer.parameters())
    before = versions(parameters)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert versions(parameters) > before


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ("z f b s", "z, f, b, s"),
        ("z f b f b f b s", "z, (f, b) x 3, s"),
        ("z f b z f b s", "(z, f, b) x 2, s"),
        ("b b s", "b x 2, s"),
        ("f b f b c f b f b c s", "(f, b, f, b, c) x 2, s"),
        ("s", "s"),
        ("", ""),
    ],
)
def test_repeats_are_folded(calls: str, told: str) -> None:
    assert ", ".join(folded(calls.split())) == told


def test_a_long_step_is_told_in_short() -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        for micro in range(30):
            (cross_entropy(model) / 30).backward()
            if micro % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5 + micro)
            if micro % 3:
                model.eval()
        optimizer.step()
        optimizer.zero_grad()

    (found,) = run(body, inspect_steps=4)
    assert found.code == "GG234"
    assert len(str(found.evidence["saw"])) < 2000


def test_a_step_of_more_calls_than_are_kept_is_not_judged() -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        for _micro in range(200):
            optimizer.zero_grad()
            (cross_entropy(model) / 200).backward()
        optimizer.step()

    assert run(body, steps=2) == []


def test_a_failure_of_its_own_is_named_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LoopRecorder, owner: Any) -> None:
        raise LookupError("broken")

    monkeypatch.setattr(LoopRecorder, "zeroed", broken)
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[LoopOrder()], summary=False, sinks=[]) as guardian:
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(model).backward()
            optimizer.step()
    (found,) = guardian.findings
    assert (found.code, found.guard) == ("GG906", "LoopOrder")
    assert guardian.step == 4
    assert torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"


def test_what_another_thread_calls_is_no_part_of_the_loop() -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model)
        loss.backward()
        thread = threading.Thread(target=nn.utils.clip_grad_norm_, args=(list(model.parameters()), -1.0))
        thread.start()
        thread.join()
        optimizer.step()

    assert run(body) == []
