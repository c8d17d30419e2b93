"""What loops with a wrong loss, and their healthy twins, share: how a case is written, and how it is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.guardian import Guardian

LossOf = Callable[[Any], Tensor]
Made = tuple[nn.Module, LossOf]
Make = Callable[[], Made]
CLASSES, WIDTH, ROWS = 7, 12, 16


class Case(NamedTuple):
    """A function that makes a model and what computes the loss of one batch; `code` is None for a healthy twin.

    `cause` is a piece of the first cause, `line` one of the user's line; `raises` is torch's own error, which follows;
    `noted` is the code of a note that a healthy twin may leave, `module` the path that must be named.
    """

    name: str
    kind: str
    make: Make
    code: str | None = None
    cause: str = ""
    line: str = ""
    raises: type[Exception] | None = None
    noted: str | None = None
    module: str | None = None


CASES: list[Case] = []


def bug(
    kind: str,
    code: str,
    cause: str = "",
    line: str = "",
    raises: type[Exception] | None = None,
    module: str | None = None,
) -> Callable[[Make], Make]:
    """Register a case that must be found."""

    def register(make: Make) -> Make:
        CASES.append(Case(make.__name__, kind, make, code, cause, line, raises, module=module))
        return make

    return register


def healthy(kind: str, noted: str | None = None) -> Callable[[Make], Make]:
    """Register a twin that must be silent, but for a note that is named."""

    def register(make: Make) -> Make:
        CASES.append(Case(make.__name__, kind, make, noted=noted))
        return make

    return register


def run(case: Case, steps: int = 3, **options: Any) -> Guardian:
    """Train for a few steps, as a user's loop does; an error that torch raises by itself ends it."""
    torch.manual_seed(0)
    model, loss_of = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guardian = Guardian(model, optimizer, sinks=[], **options)
    try:
        with warnings.catch_warnings(), guardian:
            # torch warns of some of these as well.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(steps):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
    except Exception as error:
        if case.raises is None or not isinstance(error, case.raises):
            raise
    return guardian


def mlp_body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU())


def classifier(*last: nn.Module, classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(*mlp_body(), nn.Linear(24, classes), *last)


def features() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH)
    return x, x[:, :CLASSES].argmax(1)


Loss = Callable[[Tensor, Tensor], Tensor]


def plain(loss: Loss, *last: nn.Module, classes: int = CLASSES) -> Made:
    """A classifier, and `loss(scores, ids)`."""

    def loss_of(model: Any) -> Tensor:
        x, y = features()
        return loss(model(x), y)

    return classifier(*last, classes=classes), loss_of


def several_labels(loss: Loss, *last: nn.Module) -> Made:
    """A model with one output for each of several labels, and `loss(scores, labels)`."""

    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        return loss(model(x), (x[:, :CLASSES] > 0).float())

    return classifier(*last), loss_of


def sequence(squash: Callable[[Tensor], Tensor], loss: Loss) -> Made:
    """Scores `[B, T, C]`, squashed, flattened for the loss."""

    def loss_of(model: Any) -> Tensor:
        x = torch.randn(5, 9, WIDTH)
        return loss(squash(model(x)).reshape(-1, CLASSES), x[..., :CLASSES].argmax(-1).reshape(-1))

    return classifier(), loss_of


def teacher(loss: Loss) -> Made:
    """Distillation: `loss(student, teacher)` of raw scores."""
    old = classifier()

    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        with torch.no_grad():
            goal = 3 * old(x)
        return loss(model(x), goal)

    return classifier(), loss_of


def regression(loss: Loss) -> Made:
    """One number for each row: `loss(predictions [B, 1], targets [B])`."""

    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        return loss(model(x), x.sum(1))

    return classifier(classes=1), loss_of
