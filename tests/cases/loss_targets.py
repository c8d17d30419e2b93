"""Losses that are given the wrong kind of targets, and their twins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import (
    CLASSES,
    ROWS,
    WIDTH,
    Made,
    bug,
    classifier,
    features,
    healthy,
    plain,
    regression,
    several_labels,
)
from .loss_parts import teacher as taught

RANGE, TARGETS, PAIRS = "targets out of range", "wrong kind of targets", "all pairs"
with_logits = F.binary_cross_entropy_with_logits


@bug(RANGE, "GG604", "The targets were made with a larger vocabulary", raises=IndexError)
def a_class_too_many() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y + 1))


@bug(RANGE, "GG604", "Positions to ignore are marked by another number", raises=IndexError)
def ignored_by_another_number() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y.masked_fill(y < 2, -1)))


@bug(RANGE, "GG604", "Positions to ignore are marked by another number", raises=IndexError)
def ignored_by_torchs_number() -> Made:
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    return plain(lambda scores, y: loss(scores, y.masked_fill(y < 2, -100)))


@healthy(RANGE)
def ignored_by_the_same_number() -> Made:
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    return plain(lambda scores, y: loss(scores, y.masked_fill(y < 2, -1)))


@healthy(RANGE)
def ignored_by_a_class() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y, ignore_index=0))


@bug(TARGETS, "GG693", "Ids became floating point", raises=RuntimeError)
def ids_as_floats() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y.float()))


@bug(TARGETS, "GG693", "The output layer has one unit")
def one_class() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y * 0), classes=1)


@bug(TARGETS, "GG693", "Soft targets are raw scores")
def raw_scores_of_a_teacher() -> Made:
    return taught(F.cross_entropy)


@bug(TARGETS, "GG693", "Labels are -1 and 1")
def signs_as_labels() -> Made:
    return several_labels(lambda scores, y: with_logits(scores, 2 * y - 1))


@bug(TARGETS, "GG693", "Class ids, counts or unscaled pixels", raises=RuntimeError)
def pixels_as_labels() -> Made:
    def loss_of(model: Any) -> Tensor:
        x = torch.randint(256, (ROWS, WIDTH)).float()
        return F.binary_cross_entropy(model(x / 255), x)

    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), nn.Sigmoid()), loss_of


@bug(TARGETS, "GG693", "Class ids, counts or unscaled pixels")
def ids_as_binary_labels() -> Made:
    return plain(lambda scores, y: with_logits(scores.squeeze(1), y.float()), classes=1)


@healthy(TARGETS)
def pixels() -> Made:
    def loss_of(model: Any) -> Tensor:
        x = torch.rand(ROWS, WIDTH)
        return F.binary_cross_entropy(model(x), x, reduction="sum") / ROWS

    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), nn.Sigmoid()), loss_of


@healthy(TARGETS)
def probabilities_of_a_teacher() -> Made:
    return taught(lambda own, old: F.cross_entropy(own, old.softmax(1)))


@healthy(TARGETS)
def mixed_labels() -> Made:
    def mixed(scores: Tensor, y: Tensor) -> Tensor:
        one = F.one_hot(y, CLASSES).float()
        return F.cross_entropy(scores, 0.7 * one + 0.3 * one.flip(0))

    return plain(mixed)


@healthy(TARGETS)
def smoothed_labels() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y, label_smoothing=0.1))


@healthy(TARGETS)
def weighed_labels() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores, y, weight=torch.linspace(0.5, 2.0, CLASSES)))


@healthy(TARGETS)
def noisy_labels_of_a_critic() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        true, made = model(x), model(torch.randn_like(x))
        return with_logits(true, 0.7 + 0.5 * torch.rand_like(true)) + with_logits(made, 0.3 * torch.rand_like(made))

    return classifier(classes=1), loss_of


@bug(PAIRS, "GG694", "A linear layer with one output returns")
def a_column_against_a_row() -> Made:
    return regression(F.mse_loss)


@bug(PAIRS, "GG694", "A linear layer with one output returns")
def a_row_against_a_column() -> Made:
    return regression(lambda predictions, y: nn.SmoothL1Loss()(predictions.squeeze(-1), y.unsqueeze(-1)))


@bug(PAIRS, "GG694", "A linear layer with one output returns")
def a_column_against_a_row_by_hand() -> Made:
    return regression(lambda predictions, y: (predictions - y).pow(2).mean())


@healthy(PAIRS)
def a_row_against_a_row() -> Made:
    return regression(lambda predictions, y: F.mse_loss(predictions.squeeze(-1), y))


@healthy(PAIRS)
def a_column_against_a_column_by_hand() -> Made:
    return regression(lambda predictions, y: (y[:, None] - predictions).abs().mean())


@healthy(PAIRS)
def every_pair_is_meant() -> Made:
    """A ranking loss: which of two has the higher target."""

    def ranked(predictions: Tensor, y: Tensor) -> Tensor:
        apart = predictions - predictions.t()
        return with_logits(apart, (y[:, None] > y[None, :]).float())

    return regression(ranked)


@healthy(PAIRS)
def every_pair_is_said() -> Made:
    return regression(
        lambda predictions, y: F.mse_loss(predictions.view(-1, 1), y.view(1, -1), reduction="none").mean()
    )
