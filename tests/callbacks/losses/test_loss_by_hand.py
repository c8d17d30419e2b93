"""Losses that are written out by hand: softmax applied twice, and pictures of scores that are viewed, not permuted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.records import Severity

from .loss_loops import alone, codes

Score = Callable[[Tensor], Tensor]


def policy_loss(model: nn.Module, score: Score) -> Tensor:
    """A policy gradient on tokens: log-probabilities are gathered, no loss of torch's is called."""
    x, actions = torch.randn(8, 5, 12), torch.randint(7, (8, 5, 1))
    chosen = score(model(x)).gather(-1, actions)
    return -(chosen * torch.randn(8, 1, 1)).mean()


def probabilities(scores: Tensor) -> Tensor:
    return scores.softmax(-1).log_softmax(-1)


def by_function(scores: Tensor) -> Tensor:
    return F.log_softmax(nn.Softmax(dim=2)(scores).view_as(scores), dim=2)


@pytest.mark.parametrize("score", [probabilities, by_function])
def test_log_softmax_of_probabilities_is_told(score: Score) -> None:
    model = nn.Linear(12, 7)
    (found,) = alone(model, lambda: policy_loss(model, score)).findings
    assert (found.code, found.severity) == ("GG652", Severity.WARNING)
    assert found.where is not None
    assert "softmax" in found.where.text


@pytest.mark.parametrize(
    "score",
    [
        lambda scores: scores.log_softmax(-1),
        lambda scores: (scores.softmax(-1) + 1e-8).log(),
        lambda scores: (scores + scores.detach().softmax(-1)).log_softmax(-1),
        lambda scores: (4.0 * scores.softmax(-1)).log_softmax(-1),
        lambda scores: scores.softmax(1).log_softmax(-1),
    ],
    ids=["once", "logarithm of probabilities", "added to scores", "sharpened", "over another dimension"],
)
def test_what_is_no_second_softmax_is_silent(score: Score) -> None:
    model = nn.Linear(12, 7)
    assert codes(alone(model, lambda: policy_loss(model, score))) == []


def drawn(model: nn.Module, *, as_logits: bool) -> Tensor:
    """A policy gradient on actions that are drawn from probabilities."""
    given = model(torch.randn(32, 12)).softmax(-1)
    policy = torch.distributions.Categorical(logits=given) if as_logits else torch.distributions.Categorical(given)
    loss: Tensor = -(policy.log_prob(policy.sample()) * torch.randn(32)).mean()
    return loss


def test_probabilities_as_the_logits_of_a_distribution_are_told() -> None:
    model = nn.Linear(12, 7)
    (found,) = alone(model, lambda: drawn(model, as_logits=True)).findings
    assert found.code == "GG652"
    assert found.where is not None
    assert "logits=given" in found.where.text
    assert codes(alone(model, lambda: drawn(model, as_logits=False))) == []


def pictures(move: Score, height: int) -> list[str]:
    model = nn.Conv2d(3, 5, 3, padding=1)

    def loss() -> Tensor:
        x = torch.randn(4, 3, height, 6)
        return F.cross_entropy(move(model(x)), x.argmax(1).reshape(-1))

    return codes(alone(model, loss))


@pytest.mark.parametrize("height", [4, 5], ids=["mixed", "along a row"])
def test_pictures_of_scores_that_are_viewed_are_told(height: int) -> None:
    assert pictures(lambda scores: scores.reshape(-1, 5), height) == ["GG654"]
    assert pictures(lambda scores: scores.permute(0, 2, 3, 1).reshape(-1, 5), height) == []
