"""Losses of many kinds that look odd and are meant so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import CLASSES, ROWS, WIDTH, Made, classifier, features, healthy, mlp_body, plain, several_labels
from .loss_text import LENGTH, VOCABULARY, Recurrent, Text, flat, next_token, text

KINDS = "losses of many kinds"
with_logits = F.binary_cross_entropy_with_logits


@healthy(KINDS)
def contrast_with_a_temperature() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        one, other = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        scores = one @ other.t() / 0.2
        chosen = torch.arange(ROWS)
        return (F.cross_entropy(scores, chosen) + F.cross_entropy(scores.t(), chosen)) / 2

    return classifier(), loss_of


@healthy(KINDS)
def connectionist_temporal_classification() -> Made:
    def loss_of(model: Any) -> Tensor:
        logs = model(torch.randn(20, 4, WIDTH)).log_softmax(-1)
        sizes = torch.full((4,), 20), torch.full((4,), 5)
        return F.ctc_loss(logs, torch.randint(1, CLASSES, (4, 5)), *sizes)

    return classifier(), loss_of


@healthy(KINDS)
def policy_gradient_with_a_critic() -> Made:
    body = nn.ModuleDict({"body": mlp_body(), "policy": nn.Linear(24, 3), "value": nn.Linear(24, 1)})

    def loss_of(model: Any) -> Tensor:
        hidden = model["body"](torch.randn(64, WIDTH))
        logs, value = model["policy"](hidden).log_softmax(1), model["value"](hidden).squeeze(1)
        chosen = logs.detach().exp().multinomial(1)
        returns = 20 * torch.rand(64)
        gained = (returns - value).detach()
        entropy = -(logs.exp() * logs).sum(1).mean()
        total: Tensor = -(logs.gather(1, chosen).squeeze(1) * gained).mean() - 0.01 * entropy
        return total + 0.5 * F.mse_loss(value, returns)

    return body, loss_of


@healthy(KINDS)
def a_critic_of_probabilities() -> Made:
    def loss_of(model: Any) -> Tensor:
        true, made = model(torch.randn(ROWS, WIDTH)), model(torch.rand(ROWS, WIDTH))
        return F.binary_cross_entropy(true, torch.ones_like(true)) + F.binary_cross_entropy(
            made, torch.zeros_like(made)
        )

    return classifier(nn.Sigmoid(), classes=1), loss_of


@healthy(KINDS)
def an_autoencoder() -> Made:
    def loss_of(model: Any) -> Tensor:
        x = torch.randn(ROWS, WIDTH)
        return F.mse_loss(model(x), x)

    return classifier(classes=WIDTH), loss_of


@healthy(KINDS)
def ranking_by_a_margin() -> Made:
    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        one, other = model(x).squeeze(1), model(x.flip(0)).squeeze(1)
        return F.margin_ranking_loss(one, other, torch.ones(ROWS), margin=1.0)

    return classifier(classes=1), loss_of


@healthy(KINDS)
def quantiles() -> Made:
    """Every predicted quantile against every sample of the return, as in distributional value learning."""

    def loss_of(model: Any) -> Tensor:
        x, _ = features()
        apart = torch.randn(ROWS, CLASSES)[:, None, :] - model(x)[:, :, None]
        return F.huber_loss(apart, torch.zeros_like(apart))

    return classifier(), loss_of


@healthy(KINDS)
def distillation_and_labels() -> Made:
    old = classifier()

    def loss_of(model: Any) -> Tensor:
        x, y = features()
        scores, goal = model(x), old(x).detach()
        soft = F.kl_div((scores / 4).log_softmax(1), (goal / 4).softmax(1), reduction="batchmean")
        return F.cross_entropy(scores, y) + 16 * soft

    return classifier(), loss_of


@healthy(KINDS)
def one_label_of_several() -> Made:
    return plain(lambda scores, y: with_logits(scores, F.one_hot(y, CLASSES).float()))


@healthy(KINDS)
def focal_loss_of_labels() -> Made:
    def focal(scores: Tensor, y: Tensor) -> Tensor:
        right = torch.where(y > 0, scores.sigmoid(), 1 - scores.sigmoid())
        return ((1 - right) ** 2 * with_logits(scores, y, reduction="none")).mean()

    return several_labels(focal)


@healthy(KINDS)
def a_gate_of_experts() -> Made:
    """The share of each expert is a softmax; a small loss keeps them even."""
    model = nn.ModuleDict({"gate": nn.Linear(WIDTH, 4), "experts": nn.ModuleList(classifier() for _ in range(4))})

    def loss_of(model: Any) -> Tensor:
        x, y = features()
        gate = model["gate"](x).softmax(-1)
        scores = torch.stack([gate[:, k, None] * expert(x) for k, expert in enumerate(model["experts"])]).sum(0)
        total: Tensor = F.cross_entropy(scores, y) + 0.01 * 4 * gate.mean(0).pow(2).sum()
        return total

    return model, loss_of


@healthy(KINDS)
def segmentation() -> Made:
    def loss_of(model: Any) -> Tensor:
        images = torch.randn(4, 3, 8, 8)
        return F.cross_entropy(model(images), images.argmax(1), ignore_index=2)

    return nn.Conv2d(3, 3, 3, padding=1), loss_of


@healthy(KINDS)
def a_head_for_each_attribute() -> Made:
    """Scores `[B, attributes, values]`, classes second."""

    def loss_of(model: Any) -> Tensor:
        scores = model(torch.randn(ROWS, WIDTH)).view(ROWS, 3, 5)
        return F.cross_entropy(scores.transpose(1, 2), torch.randint(5, (ROWS, 3)))

    return classifier(classes=15), loss_of


@healthy(KINDS)
def a_transformer_of_torch_time_first() -> Made:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids.t())
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(0))
            scores: Tensor = self.head(self.layer(x, src_mask=mask))
            return scores

    return next_token(lambda x, y: y.t(), Encoder())


@healthy(KINDS)
def a_bigram_model() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        return flat(model(ids[:, :-1]), ids[:, 1:])

    return nn.Embedding(VOCABULARY, VOCABULARY), loss_of


@healthy(KINDS)
def the_loss_in_chunks() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        scores, y = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        parts = [
            F.cross_entropy(part, goal, reduction="sum")
            for part, goal in zip(scores.split(16), y.split(16), strict=True)
        ]
        return torch.stack(parts).sum() / y.numel()

    return Text(), loss_of


@healthy(KINDS)
def an_encoder_and_a_decoder_that_copy() -> Made:
    """The goal is the source; the decoder is fed the goal of the position before."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.goal = Text(causal=False), Text()

        def forward(self, source: Tensor, goal: Tensor) -> Tensor:
            scores: Tensor = self.goal(goal) + self.source(source).mean(1, keepdim=True)
            return scores

    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        return flat(model(ids, torch.cat([torch.zeros(len(ids), 1, dtype=torch.long), ids[:, :-1]], 1)), ids)

    return Copies(), loss_of


@healthy(KINDS, noted="GG653")
def an_echo() -> Made:
    """A recurrent network learns to repeat what it read the step before."""

    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        y = ids.roll(1, 1).masked_fill(torch.arange(LENGTH) < 1, 0)
        return flat(model(ids), y.t())

    return Recurrent(), loss_of


@healthy(KINDS)
def pairs_of_a_product() -> Made:
    """All users against all items, in-batch negatives."""

    def loss_of(model: Any) -> Tensor:
        users, items = model(torch.randn(ROWS, WIDTH)), model(torch.randn(ROWS, WIDTH))
        return with_logits(users @ items.t(), torch.eye(ROWS))

    return classifier(), loss_of


@healthy(KINDS)
def weights_of_samples() -> Made:
    def loss(scores: Tensor, y: Tensor) -> Tensor:
        weights = torch.rand(ROWS)
        total: Tensor = (F.cross_entropy(scores, y, reduction="none") * weights).sum() / weights.sum()
        return total

    return plain(loss)
