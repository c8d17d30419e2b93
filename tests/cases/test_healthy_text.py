"""Healthy text models of other kinds and precisions stay silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 24, 12, 32
STEPS = 60
Guarded = Callable[..., Any]


def batch(rows: int = 8, highest: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Counting up in steps of 1 to 3: easy to learn."""
    start, stride = torch.randint(highest, (rows, 1)), torch.randint(1, 4, (rows, 1))
    ids = (start + stride * torch.arange(LENGTH + 1)) % highest
    return ids[:, :-1], ids[:, 1:]


def train(model: nn.Module, optimizer: Any, **data: Any) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch(**data))[1].backward()
        optimizer.step()


def adam(model: nn.Module, lr: float = 3e-3) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr)


class Masked(nn.Module):
    """Attention by hand, with a mask of -inf as buffer or as input, through a softmax module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax, self.scores = nn.Softmax(-1), nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.position = nn.Embedding(LENGTH, WIDTH)
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, ids: Tensor, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.embed(ids) + self.position.weight
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.scores(q @ k.mT / WIDTH**0.5 + (self.mask if mask is None else mask))
        logits = self.head(x + self.softmax(scores) @ v)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("as_input", [False, True])
def test_masks_of_minus_infinity(guarded: Guarded, as_input: bool) -> None:
    model = Masked()
    optimizer = adam(model)
    extra = [torch.full((LENGTH, LENGTH), -math.inf).triu(1)] if as_input else []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(*batch(), *extra)[1].backward()
            optimizer.step()


def test_unused_embedding_rows(guarded: Guarded) -> None:
    model = Masked()
    optimizer = adam(model)
    with guarded(model, optimizer):
        train(model, optimizer, highest=7)


def test_sparse_embedding(guarded: Guarded) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.table(ids))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = Bag()
    optimizers = [torch.optim.SparseAdam(model.table.parameters(), lr=1e-2), adam(model.head)]
    with guarded(model, optimizers):
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(*batch())[1].backward()
            for optimizer in optimizers:
                optimizer.step()


def test_weights_in_bfloat16(guarded: Guarded) -> None:
    model = Masked().to(torch.bfloat16)
    optimizer = adam(model, 1e-2)
    with guarded(model, optimizer):
        train(model, optimizer)


def test_autocast_with_a_scaler_that_overflows_at_first(guarded: Guarded) -> None:
    model = Masked()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with guarded(model, optimizer) as guardian:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = 4 * model(*batch())[1]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert guardian.report().skipped_steps > 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent(guarded: Guarded, kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), kind(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
            output, state = self.cell(self.embed(ids), state)
            return self.head(output), state

    model, state = Recurrent(), None
    optimizer = adam(model, 1e-2)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            ids, targets = batch()
            optimizer.zero_grad()
            logits, state = model(ids, state)
            state = tuple(each.detach() for each in state) if isinstance(state, tuple) else state.detach()
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
