"""What an autograd graph tells: leaves, their order in backward and operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.hooks.autograd_graph.nodes import leaves, operations, uses, uses_any


def test_leaves_are_found_once_each() -> None:
    layer = nn.Linear(3, 3)
    loss = (layer(layer(torch.ones(2, 3))) ** 2).sum()
    assert {id(leaf) for leaf in leaves(loss)} == {id(parameter) for parameter in layer.parameters()}
    assert len(leaves(loss)) == 2


def test_a_leaf_is_its_own_leaf_and_a_constant_has_none() -> None:
    leaf = torch.ones((), requires_grad=True)
    assert leaves(leaf)[0] is leaf
    assert leaves(torch.ones(())) == []


def test_a_loss_uses_only_what_it_was_made_of() -> None:
    one, other = nn.Linear(3, 1), nn.Linear(3, 1)
    assert uses_any(one(torch.ones(3)).sum(), one.parameters())
    assert not uses_any(one(torch.ones(3)).sum(), other.parameters())
    assert not uses_any(one(torch.ones(3)).detach(), one.parameters())


def test_the_order_of_uses_is_the_order_of_backward() -> None:
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    loss = third(second(first(torch.ones(2, 3)))).sum()
    order = uses(loss)
    numbers = [order[id(layer.bias)][0] for layer in (first, second, third)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


def test_a_tied_parameter_has_a_number_for_each_use() -> None:
    table, layer = nn.Embedding(5, 3), nn.Linear(3, 3)
    loss = F.linear(layer(table(torch.arange(5))), table.weight).sum()
    late, early = uses(loss)[id(table.weight)]
    assert early < uses(loss)[id(layer.bias)][0] < late


def test_the_order_is_known_after_backward_has_freed_the_graph() -> None:
    layer = nn.Linear(3, 1)
    loss = layer(torch.ones(3)).sum()
    before = uses(loss)
    loss.backward()
    assert uses(loss) == before


def test_a_function_of_ones_own_has_its_place() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    layer, scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
    loss = (Double.apply(scale) * layer(torch.ones(3))).sum()  # type: ignore[no-untyped-call]  # torch leaves it so
    assert id(scale) in uses(loss)
    assert "Double" in operations(loss)


def test_operations_are_named_newest_first() -> None:
    x = torch.ones(3, requires_grad=True)
    assert operations((x.exp().sum() / 3).log()) == ["Log", "Div", "Sum", "Exp"]
    assert operations(torch.ones(())) == []
