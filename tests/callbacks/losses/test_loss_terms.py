"""The terms of a loss, their weights and their names, read from its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_guard.callbacks.losses.terms import LossCall, LossTerm, may_be_walked, terms_of
from gpt_guard.hooks.autograd_graph.origin import sequence_of

Loss = Callable[[Tensor, Tensor], Tensor]


def of(loss: Loss) -> list[LossTerm]:
    """The terms of a loss made of two known ones."""
    x = torch.randn(5, requires_grad=True)
    one, other = x.pow(2).mean(), x.abs().mean()
    known = {sequence_of(each) or 0: LossCall(name, None, data=True) for name, each in (("a", one), ("b", other))}
    return terms_of(loss(one, other), known)


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (lambda a, b: a + b, {"a": 1, "b": 1}),
        (lambda a, b: a - 0.5 * b, {"a": 1, "b": 0.5}),
        (lambda a, b: (a + b / 4) * 2 + 1, {"a": 2, "b": 0.5}),
        (lambda a, b: sum([a, b], torch.zeros(())), {"a": 1, "b": 1}),
        (lambda a, b: torch.stack([a, b]).sum(), {"a": 1, "b": 1}),
        (lambda a, b: torch.stack([a, 3 * b]).mean(), {"a": 0.5, "b": 1.5}),
        (lambda a, b: (-a + b.view(1).squeeze()) * torch.tensor(2.0), {"a": -2, "b": 2}),
        (lambda a, b: a, {"a": 1}),
    ],
)
def test_terms_and_weights(loss: Loss, weights: dict[str, float]) -> None:
    assert {term.name: term.weight for term in of(loss)} == pytest.approx(weights)


def test_a_factor_with_a_gradient_belongs_to_its_term() -> None:
    found = of(lambda a, b: a + a.detach() * b + a * b)
    assert len(found) == 3
    assert [term.weight for term in found if term.data][:1] == [1.0]


def test_terms_of_one_name_get_numbers() -> None:
    assert [term.name for term in of(lambda a, b: a + 2 * a)] == ["a #1", "a #2"]


def test_other_terms_are_named_by_their_operations() -> None:
    x = torch.randn(5, requires_grad=True)
    found = terms_of(x.pow(2).mean() + x.exp().sum(), {})
    assert [term.name for term in found] == ["mean of pow", "sum of exp"]
    assert not any(term.data for term in found)


def test_a_long_list_of_terms_is_left_alone() -> None:
    x = torch.randn(20, requires_grad=True)
    assert terms_of(sum((each.pow(2) for each in x), torch.zeros(())), {}) == []


def test_where_a_backward_of_our_own_would_show() -> None:
    x = torch.randn(5, requires_grad=True)
    assert may_be_walked(x.pow(2).exp().sum())
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        packed = x.exp()
    assert not may_be_walked(packed.sum())
    doubled: Tensor = Twice.apply(x)  # type: ignore[no-untyped-call]  # torch gives it no types
    assert not may_be_walked(doubled.sum())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]
