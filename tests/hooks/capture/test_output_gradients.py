"""Gradients that reach outputs: which outputs count, and for which of them a hook waits."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from gpt_guard.hooks.capture.output_gradients import (
    OutputGradient,
    UsedOutputs,
    await_gradients,
    direct,
    gradients_of,
    reached,
)


def outputs() -> tuple[Tensor, Tensor]:
    """Logits, and a loss that is computed from them."""
    weight = torch.ones(2, 3, requires_grad=True)
    logits = weight * 2
    return logits, logits.square().mean()


def positions_of(losses: list[Tensor], output: Any) -> list[str]:
    waiting = await_gradients(output, ())
    first, _ = reached(losses, {each.number for each in waiting})
    return [each.position for each in waiting if each.number in first]


def test_the_gradient_arrives_with_all_that_the_loop_does_to_its_loss() -> None:
    logits, _ = outputs()
    (waiting,) = await_gradients(logits)
    (logits.sum() * 8 / 4).backward()
    assert waiting.gradient is not None
    assert torch.equal(waiting.gradient, torch.full((2, 3), 2.0))


def test_it_waits_only_where_it_is_told_to() -> None:
    output = {"logits": outputs()[0], "mask": torch.ones(3), "other": outputs()[0]}
    first, second = await_gradients(output, {"['other']"})
    (output["logits"].sum() + output["other"].sum()).backward()
    assert (first.position, first.gradient) == ("['logits']", None)
    assert second.gradient is not None


def test_of_several_outputs_of_one_operation_each_gets_its_own() -> None:
    parts = torch.ones(4, requires_grad=True).mul(1).unbind()
    waiting = await_gradients(parts)
    (parts[1] * 3 + parts[2] * 5).backward()
    assert [None if each.gradient is None else each.gradient.item() for each in waiting[1:3]] == [3.0, 5.0]


def test_an_output_that_is_written_to_later_keeps_its_gradient() -> None:
    output = torch.ones(3, requires_grad=True) * 1
    (waiting,) = await_gradients(output)
    output.mul_(7)
    output.sum().backward()
    assert waiting.gradient is not None
    assert torch.equal(waiting.gradient, torch.full((3,), 7.0))


def test_an_output_that_is_waited_at_can_be_pickled_without_a_warning() -> None:
    logits, _ = outputs()
    await_gradients(logits)
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), logits)
    assert logits._backward_hooks is None


def test_the_loss_that_the_model_returned_stands_for_what_it_was_computed_from() -> None:
    logits, loss = outputs()
    assert positions_of([loss], (logits, loss)) == ["[1]"]
    assert positions_of([loss / 4], (logits, loss)) == ["[1]"]


def test_a_loss_that_is_computed_outside_comes_from_the_logits() -> None:
    logits, loss = outputs()
    assert positions_of([logits.exp().mean()], (logits, loss)) == ["[0]"]


def test_what_is_reached_both_ways_is_not_counted_twice() -> None:
    logits, loss = outputs()
    assert positions_of([loss + 0.1 * logits.sum()], (logits, loss)) == ["[1]"]


def test_of_two_outputs_that_know_nothing_of_each_other_both_count() -> None:
    first, second = outputs()[0], outputs()[0]
    assert positions_of([first.sum() + second.sum()], (first, second)) == ["[0]", "[1]"]
    assert positions_of([first.sum(), second.sum()], [first, second]) == ["[0]", "[1]"]
    assert positions_of([torch.ones(3, requires_grad=True).sum()], (first, second)) == []


def test_the_gradient_of_an_output_that_is_the_loss_is_one() -> None:
    logits, loss = outputs()
    waiting = await_gradients((logits, loss), ())
    assert direct([loss], waiting) is waiting[1]
    assert gradients_of(waiting, [loss]) == {"[1]": torch.ones(())}
    assert direct([loss * 2], waiting) is None
    assert direct([logits], waiting) is None
    assert gradients_of(waiting, [loss * 2]) == {}


# Where nothing waits.


def learn(used: UsedOutputs, steps: int, *, outside: bool) -> list[OutputGradient]:
    waiting: list[OutputGradient] = []
    for _ in range(steps):
        logits, loss = outputs()
        waiting = await_gradients((logits, loss), used.positions)
        total = logits.exp().mean() if outside else loss
        used.backward_begins([total], [waiting])
        total.backward()
    return waiting


def test_a_loop_whose_loss_is_returned_soon_has_no_hook() -> None:
    used = UsedOutputs()
    learn(used, 4, outside=False)
    assert used.positions == frozenset()
    assert [each.gradient for each in learn(used, 1, outside=False)] == [None, None]


def test_a_loop_whose_loss_is_computed_outside_has_one_at_the_logits() -> None:
    used = UsedOutputs()
    learn(used, 4, outside=True)
    assert used.positions == frozenset({"[0]"})
    logits, loss = learn(used, 1, outside=True)
    assert logits.gradient is not None
    assert loss.gradient is None


def test_a_loss_from_elsewhere_is_learnt_anew() -> None:
    used = UsedOutputs()
    learn(used, 4, outside=False)
    learn(used, 1, outside=True)
    assert used.positions is None
    learn(used, 4, outside=True)
    assert used.positions == frozenset({"[0]"})


def test_positions_are_those_of_a_walk_however_many_there_are() -> None:
    output = tuple(torch.ones(2, requires_grad=True) * place for place in range(20))
    assert [each.position for each in await_gradients(output, ())] == [f"[{place}]" for place in range(20)]
    mixed = (None, {"x": output[0]}, output[1])
    assert [each.position for each in await_gradients(mixed, ())] == ["[1]['x']", "[2]"]
