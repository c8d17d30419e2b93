"""The same batch each time is a fault where batches are drawn, and may be all there is where they are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.data.guard import DataWatch
from gpt_guard.callbacks.data.loaders import Draws
from gpt_guard.guardian import Guardian
from gpt_guard.records import Severity

ROWS, FEATURES, STEPS = 24, 3, 25
Batch = Callable[[Tensor], Tensor]


def severities(batch: Batch, optimizer: Callable[[Any], Any] = torch.optim.Adam) -> list[Severity]:
    """What DataWatch makes of a loop whose inputs are `batch(data)` in each step."""
    data = torch.rand(200, FEATURES)
    model = nn.Linear(FEATURES, 1)
    made = optimizer(model.parameters())

    def closure() -> Tensor:
        x = batch(data)
        made.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        return loss

    with Guardian(model, made, sinks=[], guards=[DataWatch()]) as guardian:
        for _ in range(STEPS):
            made.step(closure)
    assert {found.code for found in guardian.findings} <= {"GG605"}
    return [found.severity for found in guardian.findings]


ARRAY = numpy.random.default_rng(0).random((ROWS, FEATURES), dtype=numpy.float32)
LINE = torch.linspace(0, 1, ROWS)
PLACES = torch.arange(ROWS)


@pytest.mark.parametrize(
    "batch",
    [
        lambda data: torch.from_numpy(ARRAY),
        lambda data: torch.from_numpy(ARRAY).view(-1, FEATURES),
        lambda data: torch.tensor(ARRAY),
        lambda data: torch.stack([LINE, LINE**2, 1 - LINE], 1),
        lambda data: (data - data.mean(0)) / data.std(0),
        lambda data: data[PLACES],
    ],
    ids=["an array", "a view of it", "a copy of it", "a formula", "standardised", "chosen rows"],
)
def test_all_the_data_there_is_is_only_recorded(batch: Batch) -> None:
    assert severities(batch) == [Severity.INFO]


def seeded_torch(data: Tensor) -> Tensor:
    torch.manual_seed(3)
    return data[torch.randint(len(data), (ROWS,))]


def seeded_generator(data: Tensor) -> Tensor:
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(3))[:ROWS]]


def seeded_numpy(data: Tensor) -> Tensor:
    numpy.random.seed(3)
    return data[torch.from_numpy(numpy.random.choice(len(data), ROWS))]


def seeded_python(data: Tensor) -> Tensor:
    random.seed(3)
    return data[random.sample(range(len(data)), ROWS)]


@pytest.mark.parametrize("batch", [seeded_torch, seeded_generator, seeded_numpy, seeded_python])
def test_rows_that_are_drawn_each_time_and_are_always_the_same(batch: Batch) -> None:
    assert severities(batch) == [Severity.WARNING]


def test_lbfgs_needs_the_same_data_in_each_step() -> None:
    assert severities(lambda data: data, torch.optim.LBFGS) == []


def test_memory_of_numpy_that_was_given_to_other_values_is_no_longer_the_same() -> None:
    def changing(data: Tensor) -> Tensor:
        ARRAY[:] = numpy.random.default_rng().random(ARRAY.shape)
        return torch.from_numpy(ARRAY)

    assert severities(changing) == []


def test_only_what_moves_before_the_first_forward_counts() -> None:
    still, moved = Draws(), Draws()
    still.forward_begins()
    torch.rand(1)
    still.forward_begins()
    moved.forward_begins()
    assert (still.seen, moved.seen) == (False, True)
