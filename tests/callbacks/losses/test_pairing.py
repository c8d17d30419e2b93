"""Padded rows whose last target is no input: too few targets fit to be sure of the order, and none is made up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.losses.guard import LossInputs
from gpt_guard.guardian import Guardian

PAD = 19


class Reader(nn.Module):
    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(PAD + 1, 16, padding_idx=PAD)
        self.cell, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, PAD + 1)
        self.turned = turned

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cell(self.table(ids))[0])
        return scores.transpose(0, 1) if self.turned else scores


def codes(*, turned: bool, shortest: int) -> set[str]:
    torch.manual_seed(0)
    model = Reader(turned=turned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[], inspect_steps=6) as guardian:
        for _ in range(6):
            text = torch.randint(PAD, (8, 17))
            x, y = text[:, :-1].clone(), text[:, 1:].clone()
            for row in range(8):
                end = int(torch.randint(shortest, 17, ()))
                x[row, end:] = PAD
                y[row, end:] = PAD
            optimizer.zero_grad()
            F.cross_entropy(model(x).reshape(-1, PAD + 1), y.flatten(), ignore_index=PAD).backward()
            optimizer.step()
    return {found.code for found in guardian.findings if found.severity != "info"}


def test_short_rows_are_silent() -> None:
    assert codes(turned=False, shortest=4) == set()


def test_rows_in_another_order_are_told() -> None:
    assert codes(turned=True, shortest=16) == {"GG654"}
