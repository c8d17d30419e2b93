"""Capture: what is kept of a step, for how long, and that nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.ambient import Surroundings, surrounded_by
from gpt_guard.hooks.capture import Capture, versions_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.drop(x))
        return out


def call(capture: Capture, model: nn.Module, x: Tensor, *, evaluation: bool = False) -> Tensor:
    capture.forward_begins(((x,), {}), 0, evaluation=evaluation)
    out: Tensor = model(x)
    capture.forward_ended(out)
    return out


def backward(capture: Capture, loss: Tensor, micro_batch: int) -> None:
    capture.backward_begins((loss,))
    loss.backward()
    capture.backward_ended(micro_batch)


def test_inputs_are_kept_themselves_and_not_copied() -> None:
    model, x = Net(), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    call(capture, model, x)
    assert capture.now is not None
    assert capture.now.args[0] is x
    assert capture.now.versions == [0]
    x.add_(1)
    assert versions_of((capture.now.args, capture.now.kwargs)) == [1]


def test_a_written_parameter_shows() -> None:
    model = Net()
    capture = Capture(model, immediate=True)
    call(capture, model, torch.ones(2, 3))
    with torch.no_grad():
        model.layer.bias.add_(1)
    assert capture.now is not None
    differing = [
        before != now for before, now in zip(capture.now.parameters, capture.parameter_versions(), strict=True)
    ]
    assert differing == [False, True]


def test_a_step_takes_everything_away() -> None:
    model = Net()
    capture = Capture(model, immediate=False)
    backward(capture, call(capture, model, torch.ones(2, 3)).sum(), 1)
    assert len(capture.calls) == 1
    capture.step_ended()
    assert (list(capture.calls), capture.now) == ([], None)


def test_micro_batches_are_counted_and_kept_until_the_step_is_judged() -> None:
    model = Net()
    capture = Capture(model, immediate=False)
    for place in range(3):
        backward(capture, call(capture, model, torch.ones(2, 3)).sum(), place + 1)
    assert [each.micro_batch for each in capture.calls] == [0, 1, 2]
    assert all(each.losses and each.arrivals[0].gradient is not None for each in capture.calls)
    capture.judged()
    assert not any(each.losses or each.arrivals[0].gradient is not None for each in capture.calls)


def test_where_each_backward_is_judged_at_once_only_what_comes_after_it_is_kept() -> None:
    model = Net()
    capture = Capture(model, immediate=True)
    for place in range(3):
        backward(capture, call(capture, model, torch.ones(2, 3)).sum(), place + 1)
        assert not capture.calls[-1].losses
    assert [each.micro_batch for each in capture.calls] == [2]


def test_of_large_batches_only_the_newest_is_kept() -> None:
    model = Net()
    capture = Capture(model, immediate=False)
    large = torch.ones(500_000, 3)
    for place in range(2):
        backward(capture, call(capture, model, large).sum(), place + 1)
    assert [each.micro_batch for each in capture.calls] == [1]


def test_a_watched_loss_belongs_to_the_forward_before_it_or_inside_of_it() -> None:
    model, x = Net(), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    out = call(capture, model, x)
    after = capture.loss_begins(torch.sum, (out,), {})
    capture.loss_ended(after, out.sum())
    around = capture.loss_begins(torch.sum, (x,), {})
    capture.loss_ended(around, call(capture, model, x).sum())
    assert not after.calls_model
    assert around.calls_model
    assert [each.loss_calls for each in capture.calls] == [[after], [around]]


def test_an_evaluation_leaves_the_training_call_in_its_place() -> None:
    model, x = Net(), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    call(capture, model, x)
    training = capture.now
    with torch.no_grad():
        call(capture, model, x, evaluation=True)
    assert capture.now is training
    assert capture.evaluation is None


# Surroundings.


def test_a_forward_in_its_surroundings_is_the_forward_that_it_was() -> None:
    model, x = Net(), torch.ones(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Surroundings(model).take()
        first = model(x)
    model.eval()
    torch.rand(7)
    state = torch.get_rng_state()
    with torch.no_grad(), surrounded_by(model, ambient):
        again = model(x)
        assert torch.is_grad_enabled()
        assert model.drop.training
    assert again.dtype is torch.bfloat16
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")


def test_the_cache_of_an_autocast_that_is_running_is_neither_read_nor_written() -> None:
    model, x = Net(), torch.ones(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Surroundings(model).take()
        first: Any = model(x)
        with torch.no_grad():
            model.layer.weight.fill_(2)
        with surrounded_by(model, ambient):
            again = model(x)
        assert torch.is_autocast_cache_enabled()
        assert torch.equal(model(x).isfinite(), first.isfinite())
    assert not torch.equal(first, again)


def test_where_a_generator_cannot_be_read_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is recorded."""

    def refuse() -> Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    model = Net()
    surroundings = Surroundings(model)
    monkeypatch.setattr(surroundings, "_random", [("cpu", refuse)])
    ambient = surroundings.take()
    assert ambient.random == {}
    assert ambient.training == (True, True, True)
    with surrounded_by(model, ambient):
        model(torch.ones(2, 3))
