"""Losses whose classes are taken from the wrong dimension, and their twins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import CLASSES, ROWS, WIDTH, Made, bug, classifier, healthy, plain, sequence

DIM = "wrong dimension"


@bug(DIM, "GG692", "softmax or log_softmax has dim=0")
def softmax_over_the_batch() -> Made:
    return plain(F.nll_loss, nn.LogSoftmax(0))


@bug(DIM, "GG692", "softmax or log_softmax has dim=0")
def softmax_over_time() -> Made:
    return sequence(lambda scores: scores.log_softmax(1), F.nll_loss)


@bug(DIM, "GG692", "softmax or log_softmax has dim=0")
def log_of_softmax_over_time() -> Made:
    return sequence(lambda scores: scores.softmax(1).clamp_min(1e-9).log(), F.nll_loss)


@bug(DIM, "GG692", "softmax is called without dim", "squash(model(x))")
def no_dimension() -> Made:
    return sequence(nn.LogSoftmax(), F.nll_loss)


@bug(DIM, "GG692", "softmax is called without dim")
def no_dimension_in_a_gate() -> Made:
    gate = nn.Softmax()
    return sequence(lambda scores: scores * gate(scores), F.cross_entropy)


@healthy(DIM)
def softmax_over_classes() -> Made:
    return sequence(lambda scores: scores.log_softmax(2), F.nll_loss)


@healthy(DIM)
def no_dimension_of_two() -> Made:
    return plain(F.nll_loss, nn.LogSoftmax())


def square(*, transpose: bool) -> Made:
    """Scores `[B, T, C]` with as many positions as classes: the wrong dimension runs, too."""

    def loss_of(model: Any) -> Tensor:
        x = torch.randn(ROWS, CLASSES, WIDTH)
        scores = model(x)
        return F.cross_entropy(scores.transpose(1, 2) if transpose else scores, x[..., :CLASSES].argmax(-1))

    return classifier(), loss_of


@bug(DIM, "GG692", "cross_entropy is given [B, T, V]")
def positions_as_classes() -> Made:
    return square(transpose=False)


@healthy(DIM)
def classes_first() -> Made:
    return square(transpose=True)


@healthy(DIM)
def a_span_of_positions() -> Made:
    """Start and end of an answer are chosen among the positions."""

    def loss_of(model: Any) -> Tensor:
        scores = model(torch.randn(ROWS, 9, WIDTH))
        start, end = scores.split(1, dim=-1)
        chosen = torch.randint(9, (ROWS, 2))
        return F.cross_entropy(start.squeeze(-1), chosen[:, 0]) + F.cross_entropy(end.squeeze(-1), chosen[:, 1])

    return classifier(classes=2), loss_of


@healthy(DIM)
def a_move_on_a_board() -> Made:
    """Each square has scores for some moves; all squares' moves are the classes."""

    def loss_of(model: Any) -> Tensor:
        return F.cross_entropy(model(torch.randn(ROWS, 2, 6, 6)).flatten(1), torch.randint(4 * 36, (ROWS,)))

    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)), loss_of
