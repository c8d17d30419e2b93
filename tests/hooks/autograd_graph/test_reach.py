"""What an autograd graph tells: leaves, their order in backward, operations, and the labels of a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.hooks.autograd_graph.reach import Labels, labels_of, leaves, operations, reaches, uses


def test_leaves_are_found_once_each() -> None:
    layer = nn.Linear(3, 3)
    loss = (layer(layer(torch.ones(2, 3))) ** 2).sum()
    assert {id(leaf) for leaf in leaves(loss)} == {id(parameter) for parameter in layer.parameters()}
    assert len(leaves(loss)) == 2


def test_a_leaf_is_its_own_leaf_and_a_constant_has_none() -> None:
    leaf = torch.ones((), requires_grad=True)
    assert leaves(leaf)[0] is leaf
    assert leaves(torch.ones(())) == []


def test_a_loss_reaches_only_what_it_was_made_of() -> None:
    one, other = nn.Linear(3, 1), nn.Linear(3, 1)
    assert reaches(one(torch.ones(3)).sum(), one.parameters())
    assert not reaches(one(torch.ones(3)).sum(), other.parameters())
    assert not reaches(one(torch.ones(3)).detach(), one.parameters())


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


@pytest.mark.parametrize(("ignored", "given"), [(-100, -100), (2, 2)])
def test_labels_are_counted_from_the_loss_s_own_targets(ignored: int, given: int) -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([0, ignored, ignored, 1]), ignore_index=given)
    assert labels_of(loss * 2.0) == Labels(4, 2, ignored)


def test_labels_of_an_image_are_counted_too() -> None:
    logits = torch.randn(2, 5, 3, 3, requires_grad=True)
    loss = F.cross_entropy(logits, torch.full((2, 3, 3), -100))
    assert labels_of(loss) == Labels(18, 0, -100)


def test_no_labels_where_there_are_none_or_they_are_gone() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    assert labels_of(logits.sum()) is None
    loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    loss.backward()
    assert labels_of(loss) is None
