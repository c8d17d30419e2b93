"""Language models whose scores meet the targets of other positions, and their twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import Made, bug, healthy
from .loss_text import LENGTH, ROWS, VOCABULARY, WIDTH, Recurrent, Text, flat, next_token, text

SHIFT, ORDER = "shifted labels", "order of flattening"


class Bagged(nn.Module):
    """Scores from each token alone, through rows that were flattened before the head."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order = order
        self.tokens, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.order(self.body(self.tokens(ids))[0]).reshape(-1, WIDTH)
        scores: Tensor = self.head(hidden.tanh())
        return scores


# Shifts.


@bug(SHIFT, "GG653", "Not shifted at all")
def labels_are_the_input() -> Made:
    return next_token(lambda x, y: x)


class Shifts(Text):
    """Shifts the labels itself, as models of Hugging Face do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        scores = super().forward(ids)
        assert labels is not None
        return flat(scores[:, :-1], labels[:, 1:])


class Output(dict[str, Tensor]):
    """Scores and loss by name."""


class Named(Text):
    """Called with names, the labels first; returns both by name, and does not shift the labels, which it should."""

    def forward(self, *, labels: Tensor, input_ids: Tensor) -> Any:  # type: ignore[override]  # called by names
        scores = super().forward(input_ids)
        return Output(loss=flat(scores, labels), logits=scores)


@bug(SHIFT, "GG653", "Not shifted at all")
def labels_for_a_model_that_does_not_shift() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        loss: Tensor = model(labels=ids.clone(), input_ids=ids)["loss"]
        return loss

    return Named(), loss_of


@bug(SHIFT, "GG653", "Shifted twice", "F.cross_entropy(scores", module="")
def shifted_by_data_and_model() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        loss: Tensor = model(ids[:, :-1], labels=ids[:, 1:])
        return loss

    return Shifts(), loss_of


@healthy(SHIFT)
def shifted_by_the_model() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        loss: Tensor = model(ids, labels=ids)
        return loss

    return Shifts(), loss_of


@bug(SHIFT, "GG653", "Shifted twice")
def shifted_by_two_in_the_data() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH + 2)
        return flat(model(ids[:, :-2]), ids[:, 2:])

    return Text(), loss_of


@bug(SHIFT, "GG653", "Not shifted at all")
def a_recurrent_model_repeats() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        return flat(model(ids), ids.t())

    return Recurrent(), loss_of


@bug(SHIFT, "GG653", "Shifted the wrong way")
def shifted_backwards() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        return flat(model(ids)[:, 1:], ids[:, :-1])

    return Text(), loss_of


@healthy(SHIFT)
def shifted_by_one() -> Made:
    return next_token(lambda x, y: y)


@healthy(SHIFT, noted="GG653")
def all_tokens_are_restored() -> Made:
    """Some tokens are replaced, all are labels, and the model sees both sides."""

    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        noise = torch.rand(ids.shape) < 0.05
        return flat(model(torch.where(noise, text(LENGTH), ids)), ids)

    return Text(causal=False), loss_of


class Ahead(Text):
    """Two heads: one for the next token, one for that after it."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        scores = super().forward(ids)
        return scores, self.second(scores)


@healthy(SHIFT)
def several_tokens_ahead() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH + 2)
        one, two = model(ids[:, :-2])
        return flat(two, ids[:, 2:]) + flat(one, ids[:, 1:-1])

    return Ahead(), loss_of


@healthy(SHIFT)
def tags() -> Made:
    """A tag for each token, of another kind than the ids."""

    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        return flat(model(ids), (ids * 7) % 5)

    return Text(causal=False, classes=5), loss_of


# The order of flattening.


@bug(ORDER, "GG654", "The logits were transposed")
def logits_transposed() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        return F.cross_entropy(model(ids[:, :-1]).transpose(0, 1).reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    return Text(), loss_of


@bug(ORDER, "GG654", "The targets are [T, B]")
def targets_transposed() -> Made:
    return next_token(lambda x, y: y.t().contiguous())


@healthy(ORDER)
def both_transposed() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        return flat(model(ids[:, :-1]).transpose(0, 1), ids[:, 1:].t())

    return Text(), loss_of


@bug(ORDER, "GG654", "The targets are [T, B]")
def time_first_scores() -> Made:
    return next_token(lambda x, y: y, Recurrent())


@healthy(ORDER)
def time_first_scores_and_targets() -> Made:
    return next_token(lambda x, y: y.t(), Recurrent())


@bug(ORDER, "GG654", "view or reshape to [B, V, T]")
def viewed_as_classes_first() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        scores = model(ids[:, :-1])
        return F.cross_entropy(scores.view(scores.size(0), VOCABULARY, LENGTH), ids[:, 1:])

    return Text(), loss_of


@bug(ORDER, "GG654", "view or reshape to [B, V, T]")
def classes_first_viewed_as_rows() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        scores = model(ids[:, :-1]).transpose(1, 2)
        return F.cross_entropy(scores.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    return Text(), loss_of


@healthy(ORDER)
def transposed_to_classes_first() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    return Text(), loss_of


@bug(ORDER, "GG654", "The logits were transposed")
def hidden_states_transposed() -> Made:
    return next_token(lambda x, y: y, Bagged(lambda hidden: hidden.transpose(0, 1)))


@healthy(ORDER)
def hidden_states_in_order() -> Made:
    return next_token(lambda x, y: y, Bagged(lambda hidden: hidden))


@bug(ORDER, "GG654", "The logits were transposed")
def tags_in_another_order() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        return F.cross_entropy(model(ids).transpose(0, 1).reshape(-1, 5), ((ids * 7) % 5).view(-1))

    return Text(causal=False, classes=5), loss_of


@healthy(ORDER)
def positions_chosen_by_a_mask() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        chosen = torch.rand(ROWS, LENGTH) < 0.8
        return F.cross_entropy(model(ids[:, :-1])[chosen], ids[:, 1:][chosen])

    return Text(), loss_of
