"""What a loss pulls up, read off its gradient: losses of every kind that ask for the targets are quiet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.initial_loss.pull import judge_pull, pull

V = 11


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, V)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


def flat(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def focal(logits: Tensor, y: Tensor) -> Tensor:
    likely = logits.log_softmax(-1).gather(-1, y[..., None])
    return (-(1 - likely.exp()).square() * likely).mean()


def hinge(logits: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(logits.flatten(0, 1), y.flatten())


def asked(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[str, str] | None:
    torch.manual_seed(0)
    x, y = torch.randint(V, (3, 12)), torch.randint(V, (3, 12))
    found = pull(Scores(), x, y, loss)
    assert found is not None
    wrong = judge_pull(found)
    return None if wrong is None else (wrong.code, wrong.causes[0][:20])


@pytest.mark.parametrize(
    "loss",
    [
        flat,
        focal,
        hinge,
        lambda logits, y: flat(logits, y).exp(),
        lambda logits, y: flat(logits, y) + 0.01 * logits.logsumexp(-1).square().mean(),
        lambda logits, y: flat(logits[:, :-1], y[:, 1:]),
        lambda logits, y: F.binary_cross_entropy_with_logits(logits, F.one_hot(y, V).float()),
        lambda logits, y: F.mse_loss(logits, F.one_hot(y, V).float()),
        lambda logits, y: flat(30 * (logits / 30).tanh(), y),
        lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.2),
    ],
)
def test_losses_that_ask_for_the_target_are_quiet(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert asked(loss) is None


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (lambda logits, y: -focal(logits, y), "GG656"),
        (lambda logits, y: -3 * logits.gather(-1, y[..., None]).mean(), "GG656"),
        (lambda logits, y: flat(logits, y[:, torch.randperm(12)]), "GG654"),
        (lambda logits, y: focal(logits, y.flip(0)), "GG654"),
        (lambda logits, y: focal(logits[:, -3:], y[:, -3:]), "GG656"),
        (lambda logits, y: focal(logits[1:], y[1:]), "GG656"),
    ],
)
def test_losses_that_ask_for_something_else(loss: Callable[[Tensor, Tensor], Tensor], code: str) -> None:
    wrong = asked(loss)
    assert wrong is not None
    assert wrong[0] == code


def test_a_loss_of_other_logits_says_nothing() -> None:
    x = torch.randint(V, (2, 5))
    model = Scores()
    assert pull(model, x, x, lambda logits, y: flat(model(y), y)) is None
