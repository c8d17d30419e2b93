"""Loaders with workers that bring the same samples, and those that do not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from .data_watch import FEATURES, Case, Loop, over

WORKERS, LENGTH, ROWS = 2, 48, 8
Sample = tuple[Tensor, int]


class Stream(IterableDataset[Sample]):
    """A stream of samples; with `sharded`, each worker takes its part of it."""

    def __init__(self, *, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if self.sharded and info is not None else (0, 1)
        for number in range(first, LENGTH, step):
            yield torch.randn(FEATURES, generator=torch.Generator().manual_seed(number)), number % 3


class Drawn(Dataset[Sample]):
    """Samples that are drawn, not looked up: with a generator of its own, or the worker's."""

    def __init__(self, *, own: bool) -> None:
        self.own = random.Random(0) if own else None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Sample:
        draw: Any = self.own or random
        return torch.tensor([draw.gauss(0, 1) for _ in range(FEATURES)]), draw.randrange(3)


def trained_on(dataset: Any) -> Loop:
    """A loop over a loader with workers."""
    return over(lambda: iter(DataLoader(dataset, batch_size=ROWS, num_workers=WORKERS, multiprocessing_context="fork")))


CASES = [
    Case("the_whole_stream_in_each_worker", "workers", lambda: trained_on(Stream(sharded=False)), "GG801"),
    Case("a_generator_in_the_dataset", "workers", lambda: trained_on(Drawn(own=True)), "GG801"),
    Case("a_part_of_the_stream_in_each_worker", "workers", lambda: trained_on(Stream(sharded=True))),
    Case("the_generator_of_the_worker", "workers", lambda: trained_on(Drawn(own=False))),
]
