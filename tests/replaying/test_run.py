"""A failing step run once more: what is found again, and what is written where something differs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .steps import (
    Function,
    Net,
    Reads,
    both,
    guarded,
    halt,
    halting,
    line,
    operation,
    root_at_zero,
    root_of_negative,
    said,
    same,
    sgd,
    uneven,
)


@both
def test_a_bad_forward_names_operation_module_and_line(reads: Reads) -> None:
    found = halt(Net(root_of_negative), reads)
    assert (operation(found).name, operation(found).module, found.module) == ("sqrt", "second", "second")
    assert line(found) == "return (-x.abs() - 1).sqrt()"
    assert said(found).startswith("Reproduced: output of `second` is non-finite again")
    assert found.causes[0] == operation(found).causes[0].text


@both
@pytest.mark.parametrize("with_loss", [True, False])
def test_a_bad_gradient_names_the_forward_line_behind_it(reads: Reads, with_loss: bool) -> None:
    loss_of = (lambda output: output[1]) if with_loss else torch.mean
    found = halt(Net(root_at_zero, with_loss=with_loss), reads, loss_of)
    assert found.code == "GG104"
    assert (operation(found).name, operation(found).phase) == ("sqrt", "backward")
    assert line(found) == "return (x * 0).sqrt() + x"


@both
def test_the_loss_that_the_model_returns(reads: Reads) -> None:
    class Loss(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, (y.abs() + 1).neg().log().mean()

    found = halt(Loss(torch.tanh), reads, lambda output: output[1])
    assert found.code == "GG102"
    assert operation(found).name == "log"
    assert line(found).startswith("return y, (y.abs() + 1).neg().log()")


def bad_loss(y: Tensor) -> Tensor:
    return torch.sqrt(-1 - y.abs()).mean()


def bad_penalty(y: Tensor) -> Tensor:
    return y.mean() + torch.sqrt(y * 0).mean()


@both
@pytest.mark.parametrize("loss_of", [bad_loss, bad_penalty])
def test_code_after_the_model_is_said_to_have_made_it(reads: Reads, loss_of: Function) -> None:
    found = halt(Net(torch.tanh), reads, loss_of)
    assert found.operation is None
    assert "output" in said(found)
    assert "watch_loss" in said(found)
    assert "not in the model" in said(found) or "The code between there and backward()" in said(found)


@both
@pytest.mark.parametrize("loss_of", [bad_loss, bad_penalty])
def test_a_loss_function_that_is_known_is_looked_into(reads: Reads, loss_of: Function) -> None:
    found = halt(Net(torch.tanh), reads, loss_of, watched=True)
    assert operation(found).name == "sqrt"
    assert found.where is not None
    assert found.where.function == loss_of.__name__


@both
def test_a_loss_function_that_calls_the_model_is_run_as_a_whole(reads: Reads) -> None:
    model = Net(root_at_zero)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer, reads)

    @guardian.watch_loss
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.ones(6, 1))

    with halting(guardian) as halted:
        loss_of(model, torch.randn(6, 4)).backward()
        optimizer.step()
    assert line(halted.finding) == "return (x * 0).sqrt() + x"


@both
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_of_several_micro_batches_the_one_that_failed(reads: Reads, bad: int) -> None:
    model = Net(uneven, first=same)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer, reads)) as halted:
        for step in range(2):
            optimizer.zero_grad()
            for part in range(3):
                x = torch.randn(6, 4) * (1e4 if step == 1 and part == bad else 1.0)
                (F.mse_loss(model(x), torch.zeros(6, 1)) / 3).backward()
            optimizer.step()
    found = halted.finding
    assert (found.micro_batch, found.step) == (bad, 1)
    assert operation(found).name == "multiplication"


@both
def test_of_two_forwards_before_one_backward_either(reads: Reads) -> None:
    for place in range(2):
        model = Net(uneven, first=same)
        optimizer = sgd(model)
        with halting(guarded(model, optimizer, reads)) as halted:
            batches = [torch.randn(6, 4), torch.randn(6, 4)]
            batches[place] *= 1e5
            sum(model(x).mean() for x in batches).backward()
            optimizer.step()
        assert halted.finding.operation is not None


def test_a_scaled_loss_brings_its_scale() -> None:
    """Only with the scale does the gradient overflow."""
    model = Net(same, first=same)
    optimizer = sgd(model)
    for layer, weight in ((model.first.layer, 1e-10), (model.second.layer, 1e10), (model.head, 1.0)):
        nn.init.constant_(layer.weight, weight)
        nn.init.zeros_(layer.bias)
    with halting(guarded(model, optimizer)) as halted:
        (model(torch.full((6, 4), 1e10)).mean() * 1e20).backward()
        optimizer.step()
    found = halted.finding
    assert found.code == "GG104"
    assert operation(found).phase == "backward"


@both
def test_under_autocast(reads: Reads) -> None:
    model = Net(lambda x: (x * 0).sqrt() + x)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer, reads)) as halted:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(6, 4)).float().mean()
        loss.backward()
        optimizer.step()
    operation = halted.finding.operation
    assert operation is not None
    assert operation.operands[0].tensor is not None
    assert operation.operands[0].tensor.dtype == "bfloat16"
    assert not torch.is_autocast_enabled("cpu")


@both
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [root_of_negative, root_at_zero])
def test_with_checkpointing(reads: Reads, reentrant: bool, function: Function) -> None:
    found = halt(Net(function, checkpointed=reentrant), reads)
    assert operation(found).name == "sqrt"
    assert "sqrt()" in line(found)


@both
@pytest.mark.parametrize("function", [root_of_negative, root_at_zero])
def test_a_compiled_model_is_run_eagerly(reads: Reads, function: Function) -> None:
    found = halt(torch.compile(Net(function), backend="eager"), reads)  # type: ignore[arg-type]  # a module, says torch
    assert (operation(found).name, operation(found).module) == ("sqrt", "second")
    assert "eagerly" in said(found)


@both
def test_data_parallel_is_looked_behind(reads: Reads) -> None:
    found = halt(nn.DataParallel(Net(root_of_negative)), reads)
    assert operation(found).name == "sqrt"


@both
def test_in_an_evaluation(reads: Reads) -> None:
    model = Net(root_of_negative)
    guardian = guarded(model, None, reads)
    with halting(guardian) as halted, guardian.evaluating():
        model(torch.randn(6, 4))
    found = halted.finding
    assert found.evaluation
    assert line(found) == "return (-x.abs() - 1).sqrt()"


def test_in_inference_mode() -> None:
    model = Net(root_of_negative)
    with halting(guarded(model, None)) as halted, torch.inference_mode():
        model(torch.randn(6, 4))
    assert halted.finding.operation is not None


def test_a_step_that_a_scaler_skips_can_still_be_run() -> None:
    model = Net(root_of_negative)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with halting(guarded(model, optimizer, "per_step")) as halted:
        scaler.scale(model(torch.randn(6, 4)).mean()).backward()
        scaler.step(optimizer)
    assert operation(halted.finding).name == "sqrt"


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
