"""Losses that are given the wrong kind of scores, and their twins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import (
    Made,
    bug,
    classifier,
    features,
    healthy,
    plain,
    sequence,
    several_labels,
    teacher,
)

TWICE, KIND, SIGMOID = "softmax twice", "wrong kind of scores", "sigmoid twice"
with_logits = F.binary_cross_entropy_with_logits


@bug(TWICE, "GG652", "forward ends", "return loss(model(x), y)", module="3")
def softmax_layer() -> Made:
    return plain(F.cross_entropy, nn.Softmax(1))


@healthy(TWICE)
def no_softmax_layer() -> Made:
    return plain(F.cross_entropy)


@bug(TWICE, "GG652", "The loss calls", "softmax(-1)")
def softmax_in_the_loss() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores.softmax(-1), y))


@healthy(TWICE)
def temperature_in_the_loss() -> Made:
    return plain(lambda scores, y: F.cross_entropy(scores / 2.0, y))


class Own(nn.Module):
    """Has its loss inside, and a softmax that is written out."""

    def __init__(self, *, raw: bool) -> None:
        super().__init__()
        self.body, self.raw = classifier(), raw

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.body(x)
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        loss: Tensor = nn.CrossEntropyLoss()(scores if self.raw else weights / weights.sum(1, keepdim=True), y)
        return loss


@bug(TWICE, "GG652", "forward ends", "nn.CrossEntropyLoss()", module="")
def softmax_by_hand() -> Made:
    return Own(raw=False), lambda model: model(*features())


@healthy(TWICE)
def no_softmax_by_hand() -> Made:
    return Own(raw=True), lambda model: model(*features())


@bug(TWICE, "GG652", "nll_loss is fed")
def probabilities_into_nll() -> Made:
    return plain(F.nll_loss, nn.Softmax(1))


@healthy(TWICE)
def log_probabilities_into_nll() -> Made:
    return plain(F.nll_loss, nn.LogSoftmax(1))


@healthy(TWICE)
def log_of_softmax_into_nll() -> Made:
    return plain(lambda scores, y: F.nll_loss((scores.softmax(1) + 1e-8).log(), y))


@bug(KIND, "GG690", "nll_loss is given raw")
def raw_scores_into_nll() -> Made:
    return plain(F.nll_loss)


@bug(KIND, "GG690", "nll_loss is given raw")
def a_raw_sequence_into_nll() -> Made:
    return sequence(lambda scores: scores, nn.NLLLoss())


@healthy(KIND)
def a_sequence_into_nll() -> Made:
    return sequence(lambda scores: scores.log_softmax(-1), nn.NLLLoss())


@healthy(KIND)
def focal_loss_by_nll() -> Made:
    def focal(scores: Tensor, y: Tensor) -> Tensor:
        logs = scores.log_softmax(1)
        return F.nll_loss((1 - logs.exp()) ** 2 * logs, y)

    return plain(focal)


@bug(KIND, "GG690", "cross_entropy is given the output of a sigmoid")
def sigmoid_into_cross_entropy() -> Made:
    return plain(F.cross_entropy, nn.Sigmoid())


@healthy(KIND)
def tanh_into_cross_entropy() -> Made:
    return plain(F.cross_entropy, nn.Tanh())


@healthy(KIND, noted="GG690")
def log_probabilities_into_cross_entropy() -> Made:
    return plain(F.cross_entropy, nn.LogSoftmax(1))


@bug(KIND, "GG690", "binary_cross_entropy is given raw", raises=RuntimeError)
def raw_scores_into_bce() -> Made:
    return several_labels(F.binary_cross_entropy)


@healthy(KIND)
def sigmoid_into_bce() -> Made:
    return several_labels(F.binary_cross_entropy, nn.Sigmoid())


@bug(KIND, "GG690", "holds probabilities")
def divergence_of_probabilities() -> Made:
    return teacher(lambda own, old: F.kl_div(own.softmax(1), old.softmax(1), reduction="batchmean"))


@bug(KIND, "GG690", "holds raw scores")
def divergence_of_raw_scores() -> Made:
    return teacher(lambda own, old: F.kl_div(own, old.softmax(1), reduction="batchmean"))


@bug(KIND, "GG690", "log_target of kl_div", raises=FloatingPointError)
def divergence_from_logs() -> Made:
    return teacher(lambda own, old: F.kl_div(own.log_softmax(1), old.log_softmax(1), reduction="batchmean"))


@bug(KIND, "GG690", "The arguments of kl_div are swapped", raises=FloatingPointError)
def divergence_swapped() -> Made:
    return teacher(lambda own, old: F.kl_div(own.softmax(1), old.log_softmax(1), reduction="batchmean"))


@healthy(KIND)
def divergence() -> Made:
    return teacher(lambda own, old: F.kl_div((own / 2).log_softmax(1), (old / 2).softmax(1), reduction="batchmean"))


@healthy(KIND)
def divergence_of_logs() -> Made:
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
    return teacher(lambda own, old: kl(own.log_softmax(1), old.log_softmax(1)))


@bug(SIGMOID, "GG691", "The model ends in a sigmoid")
def sigmoid_layer() -> Made:
    return several_labels(with_logits, nn.Sigmoid())


@bug(SIGMOID, "GG691", "The model ends in a sigmoid")
def sigmoid_by_hand() -> Made:
    return several_labels(lambda scores, y: nn.BCEWithLogitsLoss()(1 / (1 + torch.exp(-scores)), y))


@bug(SIGMOID, "GG691", "The scores are the output of a softmax")
def softmax_for_labels() -> Made:
    return several_labels(with_logits, nn.Softmax(1))


@healthy(SIGMOID)
def no_sigmoid_layer() -> Made:
    return several_labels(with_logits)


@healthy(SIGMOID)
def positive_scores() -> Made:
    return several_labels(with_logits, nn.ReLU())
