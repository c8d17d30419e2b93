"""The terms of a loss are read from its graph; loss_balance gives the norms and cosines that autograd gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import GuardUsageError, LossBalance, loss_balance
from gpt_guard.callbacks.losses.terms import LossTerm, NamedLoss, may_be_walked, terms_of
from gpt_guard.hooks.autograd_graph.nodes import sequence_of

Loss = Callable[[Tensor, Tensor], Tensor]


def of(loss: Loss) -> list[LossTerm]:
    """The terms of a loss made of two known ones."""
    x = torch.randn(5, requires_grad=True)
    one, other = x.pow(2).mean(), x.abs().mean()
    known = {sequence_of(each) or 0: NamedLoss(name, None, data=True) for name, each in (("a", one), ("b", other))}
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


def two(scale: float = 100.0) -> tuple[nn.Linear, dict[str, torch.Tensor]]:
    model = nn.Linear(3, 2)
    output = model(torch.randn(5, 3))
    return model, {"small": output[:, 0].pow(2).mean(), "large": scale * output.pow(2).mean()}


def test_norms_and_cosine() -> None:
    model, losses = two()
    balance = loss_balance(losses, model)
    wanted = list(model.parameters())
    flat = {
        name: torch.cat([part.flatten() for part in torch.autograd.grad(loss, wanted, retain_graph=True)])
        for name, loss in losses.items()
    }
    for name, gradient in flat.items():
        assert math.isclose(balance.norms[name], float(gradient.norm()), rel_tol=1e-5)
    cosine = float(torch.cosine_similarity(flat["small"], flat["large"], dim=0))
    assert math.isclose(balance.cosines["small", "large"], cosine, rel_tol=1e-5)
    assert balance.shared == 2
    assert math.isclose(balance.ratio, balance.norms["large"] / balance.norms["small"])
    assert all(parameter.grad is None for parameter in model.parameters())
    sum(losses.values(), torch.zeros(())).backward()


def test_it_prints_as_a_table() -> None:
    model, losses = two()
    balance = loss_balance(losses, model.parameters())
    assert isinstance(balance, LossBalance)
    lines = str(balance).splitlines()
    assert lines[0] == "gradient norms on 2 shared parameters"
    assert [line.split()[0] for line in lines[1:]] == ["small", "large", "cosine"]


def test_opposite_losses_have_a_cosine_of_minus_one() -> None:
    model, losses = two()
    balance = loss_balance({"one": losses["small"], "other": -2 * losses["small"]}, model)
    assert balance.cosines["one", "other"] == pytest.approx(-1.0)
    assert balance.ratio == pytest.approx(2.0)


def test_only_shared_parameters_count() -> None:
    body, heads = nn.Linear(3, 4), [nn.Linear(4, 1), nn.Linear(4, 1)]
    hidden = body(torch.randn(5, 3))
    losses = {str(k): head(hidden).pow(2).mean() for k, head in enumerate(heads)}
    balance = loss_balance(losses, [*body.parameters(), *heads[0].parameters(), *heads[1].parameters()])
    assert balance.shared == 2
    assert balance.unshared == ()


def test_extreme_norms_do_not_overflow() -> None:
    model, losses = two()
    balance = loss_balance({"one": losses["small"] * 1e25, "other": losses["small"] * 1e-25}, model)
    assert balance.ratio == pytest.approx(1e50, rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"one": torch.zeros(())}, "two losses"),
        ([torch.zeros(())] * 2, "two losses"),
        ({"one": torch.zeros(()), "other": torch.zeros(())}, "no scalar with a graph"),
        ({"one": torch.zeros(3, requires_grad=True), "other": 1.0}, r"shape \[3\]"),
    ],
)
def test_unusable_losses_are_refused(losses: Any, message: str) -> None:
    with pytest.raises(GuardUsageError, match=message):
        loss_balance(losses, nn.Linear(2, 2))


def test_nothing_shared_and_nothing_trainable_are_refused() -> None:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    losses = {"one": one(torch.ones(2)).sum(), "other": other(torch.ones(2)).sum()}
    with pytest.raises(GuardUsageError, match="from two of these losses"):
        loss_balance(losses, [*one.parameters(), *other.parameters()])
    with pytest.raises(GuardUsageError, match="none of these parameters"):
        loss_balance(losses, [torch.ones(2)])
