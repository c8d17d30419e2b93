"""Mode: validation in training mode, training in eval mode, and parts in the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard import Guardian
from gpt_guard.records import Finding

from .kinds import CLASSES, WIDTH, batch, both, sgd, step, watched

VALIDATION, NEVER, AFTER, BLANKET = (
    "validation in training mode",
    "training in eval mode from the start",
    "training in eval mode after a validation",
    "a part unfrozen by a blanket train()",
)


def with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def validated(
    model: nn.Module, before: Callable[[], Any], after: Callable[[], Any], epochs: int = 2, first: bool = True
) -> list[Finding]:
    """Epochs of four steps, each with a validation of two batches after it."""
    optimizer = sgd([each for each in model.parameters() if each.requires_grad])

    def validate() -> None:
        with torch.no_grad():
            for _ in range(2):
                x, _y = batch()
                model(x)

    def loop(_: Guardian) -> None:
        for _epoch in range(epochs):
            for _turn in range(4):
                step(model, optimizer)
            before()
            validate()
            after()

    return watched(model, optimizer, loop)


@both(VALIDATION, "GG501", "model(x)", begins=4)
def batch_norm_learns_from_the_validation(broken: bool) -> list[Finding]:
    model = with_norm()
    return validated(model, (lambda: None) if broken else model.eval, model.train)


@both(VALIDATION, "GG501", "model(x)", begins=4)
def eval_of_a_part_only(broken: bool) -> list[Finding]:
    model = with_dropout()
    return validated(model, model[0].eval if broken else model.eval, model.train)


@both(NEVER, "GG502", "1")
def a_pretrained_model_that_comes_in_eval_mode(broken: bool) -> list[Finding]:
    model = with_norm().eval()
    model.train(not broken)
    return validated(model, model.eval, (lambda: None) if broken else model.train, epochs=1)


@both(NEVER, "GG502", "2")
def a_check_before_the_loop(broken: bool) -> list[Finding]:
    model = with_dropout()
    model.eval()
    model(batch()[0])
    model.train(not broken)
    return validated(model, model.eval, (lambda: None) if broken else model.train, epochs=1)


@both(AFTER, "GG503", "model.eval()", begins=4)
def train_is_called_before_the_epochs_only(broken: bool) -> list[Finding]:
    model = with_norm()
    return validated(model, lambda: model.eval(), (lambda: None) if broken else model.train)


@both(AFTER, "GG503", "model.eval()", begins=4)
def an_evaluation_that_leaves_its_mode(broken: bool) -> list[Finding]:
    model = with_dropout()

    def evaluate() -> None:
        model.eval()

    return validated(model, evaluate, (lambda: None) if broken else model.train)


class Tuned(nn.Module):
    """A pretrained part that is kept as it is, and a new head."""

    def __init__(self, kept: nn.Module) -> None:
        super().__init__()
        self.kept, self.head = kept, nn.Linear(16, CLASSES)
        self.kept.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.kept(x))
        return logits


def tuned(kept: nn.Module, broken: bool) -> list[Finding]:
    model = Tuned(kept)

    def train() -> None:
        model.train()
        if not broken:
            model.kept.eval()

    return validated(model, model.eval, train)


@both(BLANKET, "GG506", "kept.1", begins=4)
def statistics_of_a_kept_part_move(broken: bool) -> list[Finding]:
    return tuned(nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU()), broken)


@both(BLANKET, "GG506", "kept.2", begins=4)
def dropout_of_a_kept_part_wakes_up(broken: bool) -> list[Finding]:
    return tuned(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.1)), broken)
