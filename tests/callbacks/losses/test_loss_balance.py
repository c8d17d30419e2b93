"""loss_balance: norms and cosines are those of autograd, and the graph can still be used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard import GuardUsageError, LossBalance, loss_balance


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
