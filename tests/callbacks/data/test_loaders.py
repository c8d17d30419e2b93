from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from gpt_guard.callbacks.data.loaders import LoaderLog, LoaderUse, loaders_of


def loader(rows: int, shuffle: bool = False) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(20.0)), batch_size=rows, shuffle=shuffle)


def test_each_epoch_of_each_loader_is_counted_with_its_line() -> None:
    one, other = loader(5), loader(4, shuffle=True)
    log = LoaderLog()
    log.open()
    for _ in range(3):
        next(iter(one))
    list(other)
    first, second = log.uses
    assert (first.iterations, first.batches, first.batch_size, first.in_order) == (3, 4, 5, True)
    assert (second.iterations, second.batches, second.in_order) == (1, 5, False)
    assert first.line is not None
    assert "next(iter(one))" in first.line.text
    assert log.current is second
    log.close()
    list(one)
    assert log.uses == []


def test_a_loader_is_not_kept_alive() -> None:
    log = LoaderLog()
    log.open()
    passing = loader(5)
    known = weakref.ref(passing)
    list(passing)
    (use,) = log.uses
    del passing
    gc.collect()
    assert known() is None
    assert (use.batches, use.batch_size, use.workers) == (4, 5, 0)
    log.close()


def test_a_stream_is_not_asked_for_its_length() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)

        def __len__(self) -> int:
            return 2

    log = LoaderLog()
    log.open()
    # With a length that is not true, torch would warn of each batch beyond it.
    assert len(list(DataLoader(Stream(), batch_size=2))) == 3
    assert log.uses[0].batches is None
    log.close()


def test_the_order_is_that_of_the_sampler_in_use() -> None:
    class Buckets(BatchSampler):
        """Batches in an order of its own."""

    data = TensorDataset(torch.arange(20.0))
    order = SequentialSampler(data)
    makers: dict[str, tuple[DataLoader[tuple[torch.Tensor, ...]], bool]] = {
        "own batches": (DataLoader(data, batch_sampler=Buckets(order, 4, False)), False),
        "batches in order": (DataLoader(data, batch_sampler=BatchSampler(order, 4, False)), True),
        "shuffled batches": (DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False)), False),
        "single samples": (DataLoader(data, batch_size=None), True),
    }
    assert {name: LoaderUse(made, None).in_order for name, (made, _) in makers.items()} == {
        name: in_order for name, (_, in_order) in makers.items()
    }


def test_a_loader_that_lacks_what_others_have_is_iterated() -> None:
    class Bare(DataLoader[int]):
        def __init__(self) -> None:
            pass

        def _get_iterator(self) -> Any:
            return iter([1, 2, 3])

        persistent_workers = False

    log = LoaderLog()
    log.open()
    assert next(iter(Bare())) == 1
    assert log.uses == []
    log.close()


def test_the_loader_of_a_batch_is_found_by_its_data() -> None:
    data = torch.randn(21, 3)
    mine = DataLoader(TensorDataset(data), batch_size=7)
    assert any(use.is_of(mine) for use in loaders_of(data[[4, 2, 0, 1, 5, 6, 3]]))
    assert not any(use.is_of(mine) for use in loaders_of(data[:6]))
    assert not any(use.is_of(mine) for use in loaders_of(torch.randn(7, 3)))
