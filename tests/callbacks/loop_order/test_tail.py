"""Micro-batches that an epoch leaves over: told where they are dropped, silent where they are stepped or kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.callbacks.loop_order.tail import Tail
from gpt_guard.records import Moment, Severity

from .order_loops import cross_entropy, run


def epoch(
    model: Any, optimizer: Any, batches: int, *, clear: bool = True, last: bool = False, to_none: bool = True
) -> None:
    """Accumulation over 4 micro-batches."""
    if clear:
        optimizer.zero_grad(set_to_none=to_none)
    for at in range(batches):
        (cross_entropy(model) / 4).backward()
        if at % 4 == 3 or (last and at == batches - 1):
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_it_is_told_at_the_first_epoch_that_begins_with_a_change_of_mode(reads: str, to_none: bool) -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        model.train()
        epoch(model, optimizer, 10, to_none=to_none)
        model.eval()
        with torch.no_grad():
            cross_entropy(model)

    (found,) = run(body, steps=3, reads=reads, guards=default_guards())
    assert (found.code, found.severity, found.step) == ("GG237", Severity.WARNING, 2)
    assert found.evidence == {"left_over": 2, "micro_batches": 4}
    assert "zero_grad() opens the next epoch" in found.causes[0]


def test_without_such_a_sign_it_is_told_at_the_second() -> None:
    (found,) = run(lambda step, model, optimizer, kept: epoch(model, optimizer, 15), steps=4)
    assert (found.code, found.step) == ("GG237", 6)
    assert found.evidence["left_over"] == 3


def test_it_is_seen_long_after_the_inspected_steps() -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        model.train()
        epoch(model, optimizer, 8 if step < 10 else 9)

    (found,) = run(body, steps=13)
    assert (found.code, found.step) == ("GG237", 22)


def test_what_is_left_at_the_very_end_is_only_worth_knowing() -> None:
    (found,) = run(lambda step, model, optimizer, kept: epoch(model, optimizer, 14), steps=1)
    assert (found.code, found.severity, found.moment) == ("GG237", Severity.INFO, Moment.EXIT)
    assert "ended 2 micro-batches after its last step" in found.seen


def test_what_is_left_at_the_end_as_it_was_before_is_a_habit() -> None:
    (found,) = run(lambda step, model, optimizer, kept: epoch(model, optimizer, 10), steps=2)
    assert (found.code, found.severity, found.moment) == ("GG237", Severity.WARNING, Moment.EXIT)
    assert "as 2 before that were cleared without a step" in found.seen


def test_an_interrupted_run_says_nothing() -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        epoch(model, optimizer, 14)
        raise KeyboardInterrupt

    guard = LoopOrder()
    with pytest.raises(KeyboardInterrupt):
        run(body, steps=1, guards=[guard])
    assert not guard.state_dict()["tail"]["told"]


@pytest.mark.parametrize(
    "how", [{"batches": 12}, {"batches": 10, "last": True}, {"batches": 10, "clear": False}], ids=str
)
def test_epochs_that_leave_nothing_over_are_silent(how: dict[str, Any]) -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        model.train()
        epoch(model, optimizer, **how)

    assert run(body, steps=2) == []


def test_a_bad_micro_batch_that_is_left_out_is_silent() -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        model.train()
        for micro in range(4):
            if step % 5 == 4 and micro == 2:
                optimizer.zero_grad()
                continue
            (cross_entropy(model) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert run(body, steps=20) == []


def test_a_validation_that_needs_gradients_is_silent() -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        model.train()
        epoch(model, optimizer, 12)
        model.eval()
        cross_entropy(model).backward()
        model.zero_grad()

    assert run(body, steps=4) == []


def test_a_resumed_run_knows_what_it_has_seen() -> None:
    tail = Tail()
    for micro in (1, 2, 1, 2):
        tail.backward(micro)
        if micro == 2:
            tail.step(2)
    other = Tail()
    other.load_state_dict(tail.state_dict())
    assert (other.size, other.regular) == (2, 2)
    guard = LoopOrder()
    guard.load_state_dict({"tail": tail.state_dict()})
    assert guard.state_dict() == {"tail": tail.state_dict()}


def test_a_change_of_mode_between_two_steps_is_no_sign_of_a_tail() -> None:
    tail = Tail()
    for _ in range(3):
        for micro in (1, 2, 3):
            tail.backward(micro)
        assert tail.step(3) is None
    tail.mode_changed()
    tail.backward(1)
    tail.backward(1)
    tail.backward(2)
    tail.backward(3)
    assert tail.step(3) is None
