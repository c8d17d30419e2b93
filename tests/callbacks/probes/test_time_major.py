"""Ids that a model turns to `[T, B]`: asked whether rows leak as any others, wrongly viewed ones above all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

VOCABULARY, WIDTH = 19, 16
Turn = Callable[[Tensor], Tensor]


class TimeMajor(nn.Module):
    """A GRU over `[T, B]`; `turn` and `back` change the dimensions of ids and logits."""

    def __init__(self, turn: Turn, back: Turn) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.turn, self.back = turn, back

    def forward(self, ids: Tensor) -> Tensor:
        return self.back(self.head(self.cell(self.table(self.turn(ids)))[0]))


def viewed(ids: Tensor) -> Tensor:
    return ids.reshape(ids.size(1), ids.size(0))


def viewed_back(logits: Tensor) -> Tensor:
    return logits.reshape(logits.size(1), logits.size(0), -1)


def turned(ids: Tensor) -> Tensor:
    return ids.t()


def copied(ids: Tensor) -> Tensor:
    return ids.t().contiguous()


def turned_back(logits: Tensor) -> Tensor:
    return logits.transpose(0, 1)


def train(model: nn.Module) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[ModelProbe()], sinks=[]) as guardian:
        for _ in range(2):
            ids = torch.randint(VOCABULARY, (8, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    return list(guardian.findings)


def test_ids_viewed_instead_of_transposed_are_one_trouble() -> None:
    findings = train(TimeMajor(viewed, viewed_back))
    assert [found.code for found in findings if found.severity is not Severity.INFO] == ["GG661"]
    assert "view or reshape" in findings[0].causes[0]


@pytest.mark.parametrize("turn", [turned, copied])
def test_ids_that_are_transposed_are_silent(turn: Turn) -> None:
    findings = train(TimeMajor(turn, turned_back))
    assert findings == []


class Pairs(nn.Module):
    """Cuts each row in two, and gives a vector for each half: `[2 * B, C]`, as many as a row has ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        halves: Tensor = self.table(ids.reshape(2 * len(ids), -1)).mean(1)
        return halves


def test_pairs_that_are_cut_apart_are_silent() -> None:
    model = Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[ModelProbe()], sinks=[]) as guardian:
        for _ in range(2):
            one, other = model(torch.randint(VOCABULARY, (8, 16))).view(8, 2, -1).unbind(1)
            optimizer.zero_grad()
            F.cross_entropy(one @ other.t(), torch.arange(8)).backward()
            optimizer.step()
    assert guardian.findings == ()
