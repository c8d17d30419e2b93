"""What does not go bad again is said to differ, with what is known to; no place is claimed for it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from .steps import Net, Reads, both, guarded, halt, halting, root_at_zero, root_of_negative, said, sgd


def test_a_batch_that_was_written_to_is_said() -> None:
    model = Net(torch.tanh)
    model.second.function = lambda x: x + float("nan") if batch[0, 0] == 1 else x
    batch = torch.ones(6, 4)

    def forget(_module: nn.Module, _args: Any, _output: Any) -> None:
        batch.fill_(2)

    model.second.layer.register_forward_hook(lambda *_: None)
    handle = model.second.register_forward_hook(forget, prepend=True)
    found = halt(model, batch=batch)
    handle.remove()
    assert found.operation is None
    assert said(found).startswith("Not reproduced: output of `second` is finite")
    assert "The batch has been written to in place" in said(found)


def test_python_random_is_said_where_it_decides() -> None:
    draws = iter([True])

    def sometimes(x: Tensor) -> Tensor:
        random.random()
        return x * float("inf") if next(draws, False) else x

    found = halt(Net(sometimes))
    assert found.operation is None
    assert "Python's or numpy's generator" in said(found)


def test_what_cannot_be_explained_is_not_guessed_at() -> None:
    calls: list[int] = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        return x * float("inf") if len(calls) == 1 else x

    found = halt(Net(once))
    assert found.operation is None
    assert said(found).startswith("Not reproduced")
    assert "state that the forward keeps in Python objects" in said(found)


def test_an_exception_in_the_replay_is_said_and_the_finding_raised() -> None:
    calls: list[int] = []

    def breaks(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("no second time")
        return x * float("nan")

    found = halt(Net(breaks))
    assert found.code == "GG101"
    assert "the replay ended in KeyError: 'no second time'" in said(found)


def test_a_time_limit_leaves_the_plain_finding() -> None:
    found = halt(Net(root_of_negative), replay=1e-9)
    assert found.operation is None
    assert "stopped at its limit" in said(found)


def test_without_replay_nothing_is_run_again() -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return root_of_negative(x)

    found = halt(Net(counted), replay=False)
    assert len(calls) == 1
    assert (found.replay, found.operation) == (None, None)


def test_modules_called_one_by_one_are_not_replayed_and_it_is_said() -> None:
    model = Net(root_of_negative)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        model(torch.zeros(0, 4))
        model.second(torch.randn(6, 4))
    assert halted.finding.replay is not None
    assert halted.finding.replay.startswith("Not replayed")


def test_a_penalty_on_weights_is_not_laid_at_the_models_door() -> None:
    model = Net(torch.tanh)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        (model(torch.randn(6, 4)).mean() + torch.sqrt(model.head.bias.sum() * 0)).backward()
    assert halted.finding.parameter == "head.bias"
    assert halted.finding.operation is None
    assert "The loss also depends on `head.bias` directly" in said(halted.finding)


class Counting(Net):
    """Bad in its first forward only: it divides by a buffer that it counts up itself."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls: Tensor = self.calls + 1
        return super().forward(x / (self.calls - 1))


def test_state_that_the_forward_keeps_for_itself_is_named() -> None:
    found = halt(Counting())
    assert found.operation is None
    assert "The forward writes to state of its own (`calls`)" in said(found)


@both
def test_a_second_backward_through_the_same_graph(reads: Reads) -> None:
    model = Net(torch.tanh)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer, reads)) as halted:
        y = model(torch.randn(6, 4))
        y.mean().backward(retain_graph=True)
        torch.sqrt(y * 0).mean().backward()
        optimizer.step()
    assert halted.finding.micro_batch == 1
    assert "The gradient that reached output of the model is non-finite" in said(halted.finding)


@both
def test_logits_that_the_loop_uses_beside_the_returned_loss(reads: Reads) -> None:
    model = Net(torch.tanh, with_loss=True)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer, reads)) as halted:
        y, loss = model(torch.randn(6, 4))
        (loss + torch.sqrt(y * 0).mean()).backward()
        optimizer.step()
    assert "The gradient that reached output[0] of the model is non-finite" in said(halted.finding)
    assert halted.finding.operation is None


def test_a_model_that_is_compiled_in_place_hides_what_it_is_called_with() -> None:
    model = Net(root_at_zero)
    model.compile(backend="eager")
    assert "`torch.compile(model)` does not" in said(halt(model))


def test_a_mask_that_is_returned_beside_the_loss_is_not_taken_for_it() -> None:
    draws = iter([float("nan")])

    def loss_of(y: Tensor) -> Tensor:
        returned.append(y.masked_fill(y > 0, -float("inf")))
        return y.mean() * next(draws, 1.0)

    returned: list[Tensor] = []
    model = Net(torch.tanh)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)
    watched = guardian.watch_loss(lambda y: (loss_of(y), returned[-1]))
    with halting(guardian) as halted:
        watched(model(torch.randn(6, 4)))[0].backward()
    assert halted.finding.operation is None
    assert said(halted.finding).startswith("Not reproduced: the loss function returned")
