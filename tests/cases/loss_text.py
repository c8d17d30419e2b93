"""Language models whose labels do not count, or are padding, and their twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loss_parts import Made, bug, healthy

COUNT, PADDED = "labels that count", "padding as labels"
VOCABULARY, LENGTH, ROWS, WIDTH = 23, 10, 6, 16
Labels = Callable[[Tensor, Tensor], Tensor]


class Text(nn.Module):
    """One layer of attention over embedded ids `[B, T]`; scores `[B, T, V]`."""

    def __init__(self, *, causal: bool = True, padding: int | None = None, classes: int = VOCABULARY) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.mix, self.norm, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        query, key, value = self.mix(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Recurrent(nn.Module):
    """An LSTM as torch has it by default, time first: ids `[B, T]`, scores `[T, B, V]`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cell(self.tokens(ids.t()))[0])
        return scores


def text(length: int = LENGTH + 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, length))


def flat(scores: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(scores.reshape(-1, scores.size(-1)), y.reshape(-1), **options)


def next_token(change: Labels, model: nn.Module | None = None) -> Made:
    """Predict the next token; `change(x, y)` makes the labels."""

    def loss_of(model: Any) -> Tensor:
        ids = text()
        x, y = ids[:, :-1], ids[:, 1:]
        return flat(model(x), change(x, y))

    return model or Text(), loss_of


# Labels that count.


@bug(COUNT, "GG606", "The marker of the answer is not found", raises=FloatingPointError)
def all_ignored() -> Made:
    return next_token(lambda x, y: torch.full_like(y, -100))


@bug(COUNT, "GG606", "The marker of the answer is not found")
def hardly_any_counts() -> Made:
    def masked(x: Tensor, y: Tensor) -> Tensor:
        y = y.clone()
        y[0, :-1], y[1:] = -100, -100
        return y

    return next_token(masked)


@bug(COUNT, "GG606", "The marker of the answer is not found")
def all_ignored_and_summed() -> Made:
    def loss_of(model: Any) -> Tensor:
        ids = text()
        labels = torch.full_like(ids[:, 1:], -100)
        return flat(model(ids[:, :-1]), labels, reduction="sum") / max(1, int((labels != -100).sum()))

    return Text(), loss_of


@healthy(COUNT)
def long_prompts() -> Made:
    """Only the last token of each row is an answer."""

    def masked(x: Tensor, y: Tensor) -> Tensor:
        y = y.clone()
        y[:, :-1] = -100
        return y

    return next_token(masked)


@healthy(COUNT)
def one_empty_micro_batch() -> Made:
    calls = [0]

    def loss_of(model: Any) -> Tensor:
        calls[0] += 1
        ids = text()
        labels = torch.full_like(ids[:, 1:], -100) if calls[0] == 2 else ids[:, 1:]
        return flat(model(ids[:, :-1]), labels, reduction="sum") / max(1, int((labels != -100).sum()))

    return Text(), loss_of


@healthy(COUNT)
def masked_language_model() -> Made:
    """15 % of the tokens are hidden, and only those are labels; the model sees both sides."""

    def loss_of(model: Any) -> Tensor:
        ids = text(LENGTH)
        hidden = torch.rand(ids.shape) < 0.15
        hidden[:, 0] = True
        return flat(model(ids.masked_fill(hidden, 0)), ids.masked_fill(~hidden, -100))

    return Text(causal=False), loss_of


# Padding.


def padded() -> tuple[Tensor, Tensor]:
    """Rows of 1 to all tokens, then id 0; and where a token is."""
    ids = text()
    for row in range(1, ROWS):
        ids[row, LENGTH - row - 2 :] = 0
    return ids, (ids != 0).long()


def of_padded(labels: Labels, *, padding: int | None, masked: bool) -> Made:
    def loss_of(model: Any) -> Tensor:
        ids, there = padded()
        x, y = ids[:, :-1], ids[:, 1:]
        scores = model(x, attention_mask=there[:, :-1]) if masked else model(x)
        return flat(scores, labels(x, y))

    return Text(padding=padding), loss_of


@bug(PADDED, "GG608", "Rows were padded with pad_id")
def padding_of_the_embedding_counts() -> Made:
    return of_padded(lambda x, y: y, padding=0, masked=False)


@bug(PADDED, "GG608", "Rows were padded with pad_id")
def padding_of_the_mask_counts() -> Made:
    return of_padded(lambda x, y: y, padding=None, masked=True)


@healthy(PADDED, noted="GG608")
def padding_that_nothing_declares() -> Made:
    return of_padded(lambda x, y: y, padding=None, masked=False)


@healthy(PADDED)
def padding_is_ignored() -> Made:
    return of_padded(lambda x, y: y.masked_fill(y == 0, -100), padding=0, masked=True)


@healthy(PADDED)
def the_first_padding_is_the_end() -> Made:
    return of_padded(lambda x, y: y.masked_fill((y == 0) & (x == 0), -100), padding=0, masked=False)
