"""In the backward, the forward operation is told whose derivative fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_guard.replaying.trace import Trace

from .parts import NAN, Net, traced


class Blocks(nn.Module):
    """Two blocks, run as they are or under checkpointing; the second has a derivative that fails."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), RootBlock()])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.lin(x)
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return h


class RootBlock(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return (h * 0).sqrt() + h  # root


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_under_checkpointing_the_same_line_is_told(reentrant: bool | None) -> None:
    with Trace(model := Blocks(reentrant)) as trace:
        model(torch.randn(3, 4)).sum().backward()
    assert trace.skipped == {}
    found = trace.origin_of_gradient(model.lin.weight)
    assert found is not None
    assert (found.name, found.phase, found.module, found.cause) == ("sqrt", "backward", "blocks.1", "sqrt_at_zero")
    assert found.where is not None
    assert found.where.text.endswith("# root")
    assert "12 zeros" in found.shows


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_fault_of_the_forward_that_is_run_again(reentrant: bool) -> None:
    class LogBlock(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return (h * 0).log()

    model = Blocks(reentrant)
    model.blocks[1] = LogBlock()
    with Trace(model) as trace:
        loss = model(torch.randn(3, 4)).sum()
        loss.backward()
    found = trace.origin(loss)
    assert found is not None
    assert (found.name, found.phase, found.module) == ("log", "forward", "blocks.1")


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] * 0).log()  # own


def with_own_function(h: Tensor) -> Tensor:
    return Own.apply(h)  # type: ignore[no-any-return,no-untyped-call]  # torch gives it no types


def with_a_hook(h: Tensor) -> Tensor:
    y = h * 1
    y.register_hook(lambda grad: (grad * 0).log())  # own
    return y


@pytest.mark.parametrize("function", [with_own_function, with_a_hook])
def test_code_that_the_backward_calls_is_told_by_its_own_line(function: Callable[[Tensor], Tensor]) -> None:
    with Trace(model := Net(function)) as trace:
        model(torch.randn(3, 4)).sum().backward()
    found = trace.origin_of_gradient(model.lin.weight)
    assert found is not None
    assert (found.name, found.phase, found.module, found.cause) == ("log", "backward", "part", "log_of_zero")
    assert found.where is not None
    assert found.where.text.endswith("# own")


def test_a_penalty_on_the_gradient() -> None:
    """The derivative of a derivative is told by the line of the first forward."""

    def cubed(h: Tensor) -> Tensor:
        return (h * 0 + 1e-30) ** 1.5

    model = Net(cubed)
    with Trace(model) as trace:
        out = model(torch.randn(3, 4)).sum()
        (grad,) = torch.autograd.grad(out, model.lin.weight, create_graph=True)
        (grad.norm() * 0 + grad.sum().abs().sqrt()).backward()
    found = trace.origin_of_gradient(model.lin.weight)
    assert found is not None
    assert (found.name, found.phase) == ("sqrt", "backward")


def test_a_gradient_that_was_bad_before() -> None:
    model = Net(lambda h: h * 2)
    model.lin.weight.grad = torch.full((4, 4), NAN)
    with Trace(model) as trace:
        model(torch.randn(3, 4)).sum().backward()
    found = trace.origin_of_gradient(model.lin.weight)
    assert found is not None
    assert (found.kind, found.name) == ("constant", "the gradient of lin.weight")
    assert trace.origin_of_gradient(model.lin.bias) is None


def test_no_gradient_has_no_origin() -> None:
    _, trace = traced(lambda h: h)
    assert trace.origin_of_gradient(nn.Parameter(torch.ones(1))) is None


def test_a_cast_of_autocast_is_told_with_the_value() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lin(x * 0 + 1e5)  # cast
            return out

    with Trace(model := Wide()) as trace, torch.autocast("cpu", torch.float16):
        out = model(torch.randn(3, 4))
    found = trace.origin(out)
    assert found is not None
    assert (found.name, found.module, found.cause) == ("cast", "lin", "cast_overflow")
    assert found.where is not None
    assert found.where.text.endswith("# cast")
    assert "100000" in found.shows
    assert "65504" in found.shows


def test_equal_values_elsewhere_explain_no_overflow() -> None:
    """torch defines the derivative of std at 0; the gradient of another row is beyond float16."""

    def deviations(h: Tensor) -> Tensor:
        x = torch.tensor([[1.0, 1.0], [1.0, 1.001]]).half() + h[:2, :2].half() * 0
        return x.std(-1).float() * 2e3

    with Trace(model := Net(deviations)) as trace:
        model(torch.randn(3, 4)).sum().backward()
    found = trace.origin_of_gradient(model.lin.weight)
    assert found is not None
    assert (found.name, found.phase) == ("std", "backward")
    assert found.cause == "gradient_overflow"
