"""Which operations stand between the loss and a bad gradient, read from the graph that backward() has left."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.hooks.autograd_graph.gradient_path import names_of, operations_above, suspects


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * math.nan


def own(x: Tensor) -> Tensor:
    return Rounded.apply(x)  # type: ignore[no-any-return,no-untyped-call]  # torch types neither


Make = Callable[[Tensor], Tensor]
STEEP: list[tuple[str, str, Make]] = [
    ("Sqrt", "sqrt_at_zero", lambda z: (z * 0).var(0).sqrt().mean()),
    ("Pow", "sqrt_at_zero", lambda z: (z * 0).pow(0.5).mean()),
    # A learned exponent is a saved tensor, and freed by the backward.
    ("Pow", "sqrt_at_zero", lambda z: ((z * 0 - 1) ** nn.Parameter(torch.tensor(0.5))).mean()),
    ("Sqrt", "norm_at_zero", lambda z: (z * 0).pow(2).sum(-1).sqrt().mean()),
    ("Acos", "log_at_zero", lambda z: torch.acos((z * 0 + 1).clamp(-1, 1)).mean()),
    ("Where", "where_unselected", lambda z: torch.where(z.relu() == 0, torch.zeros_like(z), z / z.relu()).mean()),
    ("Softmax", "masked_row", lambda z: (z + torch.full_like(z, -math.inf)).softmax(-1).nan_to_num().sum()),
    ("LinalgEigh", "decomposition", lambda z: torch.linalg.eigh(torch.eye(3) + 0 * (z.mT @ z))[1].abs().sum()),
    ("Rounded", "hook_or_manual", lambda z: own(z).mean()),
]


@pytest.mark.parametrize(("name", "cause", "make"), STEEP)
def test_the_steep_operation_is_named_and_its_cause_comes_first(name: str, cause: str, make: Make) -> None:
    model = nn.Linear(4, 3)
    loss = make(model(torch.randn(5, 4)))
    loss.backward()
    assert not torch.isfinite(model.weight.grad).all()  # type: ignore[arg-type]  # it has a gradient
    steps = operations_above(loss, model.bias, [])
    assert name in names_of(steps)
    assert next(suspects(steps)) == cause


def test_what_stands_above_a_finite_gradient_is_left_out() -> None:
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    loss = outer(inner(torch.ones(2, 4)).exp()).pow(2).sum().sqrt()
    loss.backward()
    names = names_of(operations_above(loss, inner.bias, [outer.weight]))
    assert "Exp" in names
    assert "Sqrt" not in names
    assert "Sqrt" in names_of(operations_above(loss, inner.bias, []))


def test_ordinary_operations_suggest_nothing_and_a_foreign_tensor_has_no_way() -> None:
    model = nn.Linear(4, 3)
    loss = (model(torch.ones(2, 4)).tanh() ** 2).mean()
    assert list(suspects(operations_above(loss, model.bias, []))) == []
    assert operations_above(loss, torch.zeros(3, requires_grad=True), []) == []


def halted(model: nn.Module, loss: Make, reads: str = "immediate") -> Finding:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads):  # type: ignore[arg-type]  # str
            loss(model(torch.ones(2, 4))).backward()
            optimizer.step()

    with pytest.raises(NonFiniteError) as caught:
        train()
    return caught.value.finding


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_the_finding_tells_the_operations(reads: str) -> None:
    found = halted(nn.Linear(4, 3), lambda out: torch.acos((out * 0 + 1).clamp(-1, 1)).mean(), reads)
    assert "Acos" in found.seen
    assert "Acos" in str(found.evidence["operations"])
    assert found.causes[0].startswith("log(p)")


def test_a_hook_on_the_parameter_comes_first() -> None:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda grad: grad * math.nan)
    found = halted(model, lambda out: out.tanh().mean())
    assert found.causes[0].startswith("A hook, a custom")


def test_where_no_operation_is_steep_no_root_is_blamed() -> None:
    def spoiled(out: Tensor) -> Tensor:
        out.register_hook(lambda grad: grad * math.nan)
        return out.tanh().mean()

    found = halted(nn.Linear(4, 3), spoiled)
    assert found.causes[0].startswith("An operation that is finite where its derivative is not")
