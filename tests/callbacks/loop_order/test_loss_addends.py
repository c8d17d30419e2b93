"""How a loss was averaged is read from its graph; what is not known is not guessed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpt_guard.callbacks.loop_order.loss_addends import addends, same_graph

Make = Callable[[Tensor, Tensor], Tensor]


def logits_and_labels() -> tuple[Tensor, Tensor]:
    labels = torch.arange(6) % 3
    labels[:2] = -100
    return torch.randn(6, 3, requires_grad=True), labels


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).float()
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


KNOWN: dict[str, tuple[Make, bool, float, float]] = {
    # the loss, whether its main addend is a mean, over how many elements, times what
    "mean": (F.cross_entropy, True, 4, 1.0),
    "divided": (lambda x, y: F.cross_entropy(x, y) / 8, True, 4, 0.125),
    "multiplied": (lambda x, y: 0.25 * F.cross_entropy(x, y), True, 4, 0.25),
    "by a tensor": (lambda x, y: F.cross_entropy(x, y) / torch.tensor([4.0]).squeeze(), True, 4, 0.25),
    "sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum") / 12, False, 4, 1 / 12),
    "scaled and back": (lambda x, y: F.cross_entropy(x, y) * 1024.0 / 1024.0, True, 4, 1.0),
    "with a small addend": (lambda x, y: F.cross_entropy(x, y) + 0.01 * x.square().mean(), True, 4, 1.0),
    "square error": (lambda x, y: F.mse_loss(x, torch.zeros(6, 3)) / 2, True, 18, 0.5),
    "mean by hand": (lambda x, y: x.square().mean(), True, 18, 1.0),
    "masked by hand": (masked, False, 6, 0.25),
    "a mean of one": (lambda x, y: F.cross_entropy(x, y).reshape(1).mean() / 2, True, 4, 0.5),
    "of the batch, then of the rest": (lambda x, y: x.sum(1).mean(), True, 6, 1.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_loss_is_read(name: str) -> None:
    make, mean, count, scale = KNOWN[name]
    found = addends(make(*logits_and_labels()))

    def product(place: int) -> float:
        total = 1.0
        for factor in found[place].factors:
            total *= float(factor.value) ** factor.power
        return total

    main = max(range(len(found)), key=product)
    assert found[main].kind in ("NllLoss", "MseLoss", "Mean", "Sum")
    assert found[main].mean is mean
    assert float(found[main].count) == count
    assert product(main) == pytest.approx(scale)


class Odd(torch.autograd.Function):
    """A loss of the user's own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.mean()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.expand(6, 3)


UNKNOWN: dict[str, Make] = {
    "one of the user's own": lambda x, y: Odd.apply(x),  # type: ignore[no-untyped-call]  # so torch declares it
    "a product of two losses": lambda x, y: F.cross_entropy(x, y) * x.mean(),
    "a function of the mean": lambda x, y: F.cross_entropy(x, y).exp(),
    "one unknown addend": lambda x, y: F.cross_entropy(x, y) + x.norm(),
    "a leaf": lambda x, y: torch.zeros((), requires_grad=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_loss_says_nothing(name: str) -> None:
    assert addends(UNKNOWN[name](*logits_and_labels())) == []


def test_after_backward_the_graph_says_nothing() -> None:
    loss = F.cross_entropy(*logits_and_labels())
    loss.backward()
    assert addends(loss) == []


def number(loss: Tensor) -> int:
    assert loss.grad_fn is not None
    return loss.grad_fn._sequence_nr()


def test_a_loss_that_contains_another_is_known_by_it() -> None:
    logits, labels = logits_and_labels()
    body = logits * 2
    part = F.cross_entropy(body, labels)
    other = body.square().mean()
    total = part + other
    assert same_graph(total, {number(part)})
    assert same_graph(part, {number(part)})
    assert not same_graph(other, {number(part)})
    assert not same_graph(part, {number(other)})
    assert not same_graph(F.cross_entropy(logits * 2, labels), {number(part), number(other)})
    assert not same_graph(torch.zeros((), requires_grad=True), {number(part)})
