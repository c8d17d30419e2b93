"""Sequences are folded where they repeat, and a guard that fails while it listens does not take the loop down."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.callbacks.loop_order.order_record import Recorder
from gpt_guard.callbacks.loop_order.order_words import folded
from gpt_guard.guardian import Guardian

from .order_loops import cross_entropy, run


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
    def broken(self: Recorder, owner: Any) -> None:
        raise LookupError("broken")

    monkeypatch.setattr(Recorder, "zeroed", broken)
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
