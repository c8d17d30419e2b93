"""Losses that are reduced or added otherwise than meant, and their twins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import CLASSES, ROWS, WIDTH, Made, bug, classifier, features, healthy, mlp_body, plain

REDUCED, FIRST, ALONE = "reduction", "first loss", "one loss decides alone"


@bug(REDUCED, "GG655", "Ignored labels count in the denominator")
def mean_over_ignored_labels() -> Made:
    def loss(scores: Tensor, y: Tensor) -> Tensor:
        losses: Tensor = F.cross_entropy(scores, y.masked_fill(y < 3, -100), reduction="none")
        return losses.mean()

    return plain(loss)


@bug(REDUCED, "GG655", "Ignored labels count in the denominator")
def sum_divided_by_all_rows() -> Made:
    def loss(scores: Tensor, y: Tensor) -> Tensor:
        total: Tensor = nn.CrossEntropyLoss(reduction="sum", ignore_index=0)(scores, y)
        return total / len(y)

    return plain(loss)


@healthy(REDUCED)
def mean_over_labels_that_count() -> Made:
    def loss(scores: Tensor, y: Tensor) -> Tensor:
        y = y.masked_fill(y < 3, -100)
        total: Tensor = F.cross_entropy(scores, y, reduction="none").sum() / (y != -100).sum()
        return total

    return plain(loss)


@healthy(REDUCED)
def a_sum_over_the_targets_of_a_window_that_has_as_many_as_a_batch_has_positions() -> Made:
    def loss_of(model: Any) -> Tensor:
        # Two micro-batches of 16 positions, 8 of which count in each.
        halves = []
        for _ in range(2):
            x, y = features()
            y[ROWS // 2 :] = -100
            halves.append(F.cross_entropy(model(x), y, reduction="sum") / ROWS)
        halves[0].backward()
        return halves[1]

    return classifier(), loss_of


@bug(REDUCED, "GG655", "reduction='sum'")
def summed() -> Made:
    return plain(lambda scores, y: 0.01 * 100 * F.cross_entropy(scores, y, reduction="sum"))


@bug(REDUCED, "GG655", "reduction='sum'")
def summed_by_hand() -> Made:
    return plain(lambda scores, y: nn.CrossEntropyLoss(reduction="none")(scores, y).sum())


@healthy(REDUCED)
def weighed_by_returns() -> Made:
    """A policy gradient: the log-probability of each choice times what came of it."""

    def loss(scores: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(scores, y, reduction="none") * torch.randn(len(y))).mean()

    return plain(loss)


def confident(factor: float) -> nn.Sequential:
    model = classifier()
    nn.init.normal_(model.get_parameter("2.weight"), std=factor)
    return model


@bug(FIRST, "GG627", "label_smoothing makes confident logits dear")
def smoothing_of_confident_scores() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        scores = model(x)
        return F.cross_entropy(scores, scores.argmax(1), label_smoothing=0.3)

    return confident(8.0), loss_of


@bug(FIRST, "GG627", "Class weights move the mean")
def weights_of_rare_classes() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        scores = model(x)
        y = scores.argmax(1)
        y[0] = (y[0] + 1) % CLASSES
        rare = torch.ones(CLASSES)
        rare[y[0]] = 1000.0
        return F.cross_entropy(scores, y, weight=rare)

    return confident(8.0), loss_of


@bug(FIRST, "GG627", "Logits are too large")
def an_output_layer_of_large_weights() -> Made:
    return confident(8.0), lambda model: F.cross_entropy(model(features()[0]), features()[1])


@healthy(FIRST)
def an_output_layer_of_small_weights() -> Made:
    return confident(0.02), lambda model: F.cross_entropy(model(features()[0]), features()[1])


class Heads(nn.Module):
    """A body and two heads: one number, and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp_body()
        self.number, self.kind = nn.Linear(24, 1), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.number(hidden).squeeze(-1), self.kind(hidden)


def two_heads(unit: float, weight: float = 1.0) -> Made:
    def loss_of(model: Any) -> Tensor:
        x, y = features()
        number, kind = model(x)
        return F.mse_loss(number, unit * (2 + x.sum(1))) + weight * F.cross_entropy(kind, y)

    return Heads(), loss_of


@bug(ALONE, "GG678", "Targets are in different units", "weight * F.cross_entropy(kind, y)")
def pascals_beside_classes() -> Made:
    return two_heads(unit=1e5)


@healthy(ALONE)
def bars_beside_classes() -> Made:
    return two_heads(unit=1.0)


@healthy(ALONE, noted="GG678")
def a_small_weight_is_meant() -> Made:
    return two_heads(unit=1.0, weight=1e-5)


@bug(ALONE, "GG678", "Targets are in different units")
def two_numbers_of_one_head() -> Made:
    """Metres and seconds, each with its own squared error, stacked and summed."""

    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        far, long = model(x).unbind(1)
        loss = nn.MSELoss()
        total: Tensor = torch.stack([loss(far, 3e4 * (1 + x[:, 0])), loss(long, x[:, 1])]).sum() / 2
        return total

    return classifier(classes=2), loss_of


@healthy(ALONE)
def two_numbers_of_one_unit() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        far, long = model(x).unbind(1)
        loss = nn.MSELoss()
        total: Tensor = torch.stack([loss(far, 1 + x[:, 0]), loss(long, x[:, 1])]).sum() / 2
        return total

    return classifier(classes=2), loss_of


@healthy(ALONE)
def small_regularisers() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, y = features()
        scores = model(x)
        squares = sum(parameter.pow(2).sum() for parameter in model.parameters())
        spread = scores.logsumexp(1).pow(2).mean()
        total: Tensor = F.cross_entropy(scores, y) + 1e-6 * squares + 1e-7 * spread
        return total

    return classifier(), loss_of


@healthy(ALONE)
def a_divergence_that_warms_up() -> Made:
    """A variational autoencoder whose divergence has weight 0, then 1e-6."""
    calls = [0]

    def loss_of(model: Any) -> Tensor:
        x = torch.randn(ROWS, WIDTH)
        mean, logs = model[0](x).chunk(2, 1)
        again = model[1](mean + torch.randn_like(mean) * (logs / 2).exp())
        divergence = -0.5 * (1 + logs - mean.pow(2) - logs.exp()).sum(1).mean()
        calls[0] += 1
        total: Tensor = F.mse_loss(again, x, reduction="sum") / ROWS + 1e-6 * (calls[0] - 1) * divergence
        return total

    return nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)]), loss_of


@healthy(ALONE)
def a_head_that_starts_at_zero() -> Made:
    made = two_heads(unit=1e5)
    nn.init.zeros_(made[0].kind.weight)  # type: ignore[arg-type, union-attr]  # a head of Heads
    return made
