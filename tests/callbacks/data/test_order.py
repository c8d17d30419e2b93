"""Loaders that shuffle and give the same order in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset

from gpt_guard import DataWatch, Guardian
from gpt_guard.records import Finding

ROWS = 32
Epoch = Callable[[int], Any]


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 4), torch.randn(ROWS, 1))


def distributed(data: TensorDataset, *, shuffle: bool = True) -> Any:
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
    return DataLoader(data, batch_size=8, sampler=sampler)


class Own(Sampler[int]):
    """A sampler of the user's own, made like torch's."""

    def __init__(self, *, moves: bool = False) -> None:
        self.epoch, self.moves = 0, moves

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        if self.moves:
            self.epoch += 1
        yield from torch.randperm(ROWS, generator=generator).tolist()


class Buckets(Sampler[list[int]]):
    """Batches that somebody has put together on purpose."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from (list(range(start, start + 8)) for start in range(0, ROWS, 8))


def run(each: Epoch, epochs: int = 4) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[DataWatch()], sinks=[]) as guardian:
        for epoch in range(epochs):
            for x, y in each(epoch):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
    return [found for found in guardian.findings if found.code == "GG628"]


def always(loader: Any) -> Epoch:
    return lambda epoch: loader


def with_epoch(loader: Any, sampler: Any = None) -> Epoch:
    def begin(epoch: int) -> Any:
        (sampler or loader.sampler).set_epoch(epoch)
        return loader

    return begin


def seeded(loader: Any, generator: torch.Generator | None = None, *, add: int = 0) -> Epoch:
    def begin(epoch: int) -> Any:
        (torch if generator is None else generator).manual_seed(3 + add * epoch)
        return loader

    return begin


def shuffled(generator: torch.Generator | None = None, data: TensorDataset | None = None) -> Any:
    return DataLoader(data or dataset(), batch_size=8, shuffle=True, generator=generator)


def test_set_epoch_that_is_forgotten_is_told_in_the_second_epoch() -> None:
    (found,) = run(always(distributed(dataset())))
    assert (found.step, found.where is not None) == (5, True)
    assert "set_epoch" in found.causes[0]
    assert "DistributedSampler shuffles" in found.seen


def test_a_sampler_of_the_users_own_that_seeds_by_its_epoch() -> None:
    (found,) = run(always(DataLoader(dataset(), batch_size=8, sampler=Own())))
    assert (found.step, found.evidence["sampler"]) == (5, "Own")


def test_a_seed_that_is_set_in_each_epoch() -> None:
    (found,) = run(seeded(shuffled()))
    assert found.step == 9
    assert "seed is set" in found.causes[0]


def test_a_generator_that_is_seeded_in_each_epoch() -> None:
    generator = torch.Generator()
    assert [found.step for found in run(seeded(shuffled(generator), generator))] == [9]


def test_a_loader_that_is_made_anew_with_the_same_seed() -> None:
    data = dataset()
    assert len(run(lambda epoch: shuffled(torch.Generator().manual_seed(1), data))) == 1


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: with_epoch(distributed(dataset())),
        lambda: always(distributed(dataset(), shuffle=False)),
        lambda: always(shuffled()),
        lambda: always(shuffled(torch.Generator().manual_seed(1))),
        lambda: seeded(shuffled(), add=1),
        lambda: always(DataLoader(dataset(), batch_size=8)),
        lambda: always(DataLoader(dataset(), batch_size=8, sampler=Own(moves=True))),
        lambda: always(DataLoader(dataset(), batch_sampler=Buckets())),
        lambda: always(DataLoader(dataset(), batch_size=8, sampler=RandomSampler(range(ROWS), replacement=True))),
        lambda: lambda epoch: shuffled(torch.Generator().manual_seed(1)),
    ],
)
def test_an_order_that_changes_or_is_fixed_on_purpose_is_silent(healthy: Callable[[], Epoch]) -> None:
    assert run(healthy()) == []


def test_a_validation_in_the_same_order_is_silent() -> None:
    loader, check = shuffled(), distributed(dataset())
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[DataWatch()], sinks=[]) as guardian:
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for x, _ in check:
                    model(x)
    assert "GG628" not in {found.code for found in guardian.findings}


def test_a_loader_begun_for_each_step_is_told_as_that() -> None:
    loader = distributed(dataset())
    assert run(lambda epoch: [next(iter(loader))], epochs=12) == []
