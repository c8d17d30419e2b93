"""Kinds of the model of which the probes' own cases have fewer than two, or no twin."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.records import Finding

from .kinds import INSTANCES, Instance, both, sgd, watched

V, TABLE = 13, 12
TOO_SHORT, OTHER = "model: position table too short", "model: another attention mask or state"


class Positioned(nn.Module):
    """Tokens and learned positions, looked up in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.table = nn.Parameter(torch.randn(TABLE, 8) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        place = F.embedding(torch.arange(ids.shape[1]), self.table)
        logits: Tensor = self.head(self.tokens(ids) + place)
        return logits


def rows(lengths: Iterator[int]) -> Iterator[tuple[Tensor, Tensor]]:
    for length in lengths:
        ids = (torch.randint(V, (4, 1)) + torch.arange(length + 1)) % V
        yield ids[:, :-1], ids[:, 1:]


@both(TOO_SHORT, "GG695", "F.embedding(", begins=2)
def a_row_that_is_longer_than_the_others(broken: bool) -> list[Finding]:
    model = Positioned()
    optimizer = sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for x, y in rows(iter((8, 11, TABLE + 1 if broken else TABLE, 9))):
            optimizer.zero_grad()
            try:
                logits = model(x)
            except IndexError:
                return  # the lookup itself fails, one line later
            F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


class Pool(nn.Module):
    """Attention from one learned query; hides padding, id 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.query, self.head = nn.Embedding(V, 8), nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        keys = self.tokens(ids)
        query = self.query.expand(len(ids), 1, 8)
        mixed = F.scaled_dot_product_attention(query, keys, keys, attn_mask=(ids != 0)[:, None])
        logits: Tensor = self.head(mixed[:, 0])
        return logits


def pooled() -> list[Finding]:
    model = Pool()
    optimizer = sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for _turn in range(5):
            ids = torch.randint(1, V, (6, 9))
            ids[1:, 6:] = 0
            optimizer.zero_grad()
            F.cross_entropy(model(ids), ids[:, 0] % 2).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


INSTANCES.append(Instance(OTHER, "one query that hides padding", pooled))
