"""A gradient that is not finite halts before it is scaled or used, whatever the loop does with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import NonFiniteError

from .loop_kit import Act, Kept, batch, net, watched

BAD, STEPS = 12, 16


class Spoils(torch.autograd.Function):
    """Passes on what it is given; its backward puts a value into one element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        if ctx.value:
            grad.flatten()[0] = ctx.value
        return grad, None


def spoiled(model: nn.Module, optimizer: torch.optim.Optimizer, act: Act, value: float) -> Iterator[int]:
    """A plain loop whose backward spoils a gradient of the last layer at `BAD`; `act` runs after each backward."""
    layers = [*model.children()]
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        hidden = nn.Sequential(*layers[:-1])(x)
        spoilt = Spoils.apply(layers[-1].weight, value if step == BAD else 0.0)  # type: ignore[no-untyped-call]  # torch's own
        F.cross_entropy(hidden @ spoilt.T + layers[-1].bias, y).backward()  # the usual line
        act(step, model, optimizer)
        optimizer.step()
        yield step


def clip(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_or_raise(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def clip_in_two(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    first, *others = model.parameters()
    nn.utils.clip_grad_norm_([first], 0.1)
    nn.utils.clip_grad_norm_(others, 0.1)


def clip_by_the_largest(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, math.inf)


def clip_not(_step: int, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    return None


def clear_away(_step: int, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def put_in_place_of_it(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.nan_to_num(posinf=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "act", [clip, clip_or_raise, clip_in_two, clip_by_the_largest, clip_not, clear_away, put_in_place_of_it]
)
def test_it_halts_at_its_backward(act: Act, value: float) -> None:
    sink, model = Kept(), net()
    guardian, optimizer = watched(model, sink=sink, replay=False)
    made: list[int] = []
    weights: list[Tensor] = []

    def run() -> None:
        for step in spoiled(model, optimizer, act, value):
            made.append(step)
            weights[:] = [parameter.detach().clone() for parameter in model.parameters()]

    with pytest.raises(NonFiniteError) as halt, guardian:
        run()
    found = halt.value.finding
    assert (found.code, found.step, found.micro_batch, found.parameter) == ("GG104", BAD, 0, "4.weight")
    assert found.where is not None
    assert found.where.text.endswith("# the usual line")
    assert made == [seen.step for seen in sink.seen] == list(range(BAD))
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    # Clipping would have spread it to all of them.
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in [*model.parameters()][:-2])


def surgery(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Gradients are taken out and put back by hand: as new tensors, which may get the ids of the old."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        kept = parameter.grad.clone()
        parameter.grad = None
        parameter.grad = kept * (math.nan if step == BAD else 1.0)


def by_data(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """A write that moves no version counter."""
    if step == BAD:
        model.get_parameter("4.weight").grad.data[0, 0] = math.nan  # type: ignore[union-attr]  # it has a gradient


def by_numpy(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    if step == BAD:
        model.get_parameter("4.weight").grad.numpy()[0, 0] = math.nan  # type: ignore[union-attr]  # it has a gradient


@pytest.mark.parametrize("act", [surgery, by_data, by_numpy])
@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_one_that_code_after_the_backward_spoils_halts_at_its_step(act: Act, reads: Any) -> None:
    model = net()
    guardian, optimizer = watched(model, replay=False, reads=reads)
    with pytest.raises(NonFiniteError) as halt, guardian:
        list(spoiled(model, optimizer, act, 0.0))
    found = halt.value.finding
    assert (found.code, found.step) == ("GG104", BAD)
    assert "finite after backward()" in found.seen
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
