"""What a replay must not touch: iterators, queues, files, locks, and what it is given of them."""

from __future__ import annotations

import queue
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from .divided import Divided, batches, mean, run, weights
from .steps import Reads, both, operation, said


class FromIterator(Divided):
    """Takes its batch from what it is given."""

    def forward(self, source: Any) -> Tensor:
        return super().forward(next(source))


@both
def test_a_generator_that_is_given_is_not_read_on(reads: Reads) -> None:
    def source() -> Iterator[Tensor]:
        for number, x in enumerate(batches()):
            taken.append(number)
            yield x

    taken: list[int] = []
    batches_left = source()
    found = run(FromIterator(), reads, lambda model, x: model(batches_left).mean())
    assert taken == list(range(5))
    assert "reads from `args[0]`, an iterator (generator)" in said(found)


class Holds(Divided):
    """Takes its batch from what it holds."""

    def __init__(self, source: Any, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.source, self.take = source, take

    def before(self, x: Tensor) -> Tensor:
        return self.take(self.source)


def filled() -> queue.Queue[Tensor]:
    found: queue.Queue[Tensor] = queue.Queue()
    for x in batches():
        found.put(x)
    return found


@both
@pytest.mark.parametrize("kind", ["an iterator", "a queue"])
def test_neither_a_replay_nor_a_probe_takes_from_what_a_module_holds(kind: str, reads: Reads) -> None:
    def made() -> Holds:
        torch.manual_seed(0)
        if kind == "a queue":
            return Holds(filled(), lambda source: source.get(timeout=5))
        return Holds(iter(batches()), next)

    bare, model = made(), made()
    run(bare, None, mean)
    found = run(model, reads, mean)
    assert weights(model) == weights(bare)
    assert f"reads from `source`, {kind}" in said(found)


class Writes(Divided):
    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file

    def before(self, x: Tensor) -> Tensor:
        self.file.write("x")
        return x


@both
def test_a_replay_writes_no_second_line_into_a_file_that_a_module_holds(reads: Reads) -> None:
    with tempfile.TemporaryFile("w+") as file:
        found = run(Writes(file), reads, mean)
        file.seek(0)
        assert file.read() == "x" * 5
    assert said(found).startswith("Reproduced")


class Draws(Divided):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def before(self, x: Tensor) -> Tensor:
        return x * float(self.generator.random())


@both
@pytest.mark.parametrize("seeded", [random.Random, np.random.default_rng], ids=["python", "numpy"])
def test_a_generator_that_a_module_holds_goes_on_where_it_was(seeded: Callable[[int], Any], reads: Reads) -> None:
    bare, model = Draws(seeded(3)), Draws(seeded(3))
    model.load_state_dict(bare.state_dict())
    run(bare, None, mean)
    assert run(model, reads, mean) is not None
    assert weights(model) == weights(bare)
    assert model.generator.random() == bare.generator.random()


class Cache:
    """Of no class that torch or Python know."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: list[float] = []


class Caches(Divided):
    def __init__(self) -> None:
        super().__init__()
        self.own = Cache()

    def forward(self, x: Tensor, given: Cache | None = None) -> Tensor:
        for cache in (self.own, given):
            if cache is not None:
                cache.calls += 1
                cache.kept.append(float(x.detach().sum()))
        return super().forward(x)


@both
def test_plain_objects_are_put_back_in_modules_and_in_what_is_given(reads: Reads) -> None:
    model, given = Caches(), Cache()
    assert run(model, reads, lambda model, x: model(x, given).mean()) is not None
    assert model.own.calls == given.calls == len(given.kept) == len(model.own.kept) == 5


def test_what_holds_a_large_data_set_is_gone_through_once() -> None:
    model = Caches()
    model.own.kept = [0.0] * 200_000
    assert said(run(model, "immediate", mean)).startswith("Reproduced")
    assert len(model.own.kept) == 200_005


class TakesOut(nn.Module):
    """Empties the dict or the list that it is given, as some do with the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Divided()

    def forward(self, batch: Any) -> Tensor:
        x = batch.pop("x") if isinstance(batch, dict) else batch.pop()
        assert not batch
        found: Tensor = self.part(x)
        return found


@both
@pytest.mark.parametrize("put", [lambda x: {"x": x}, lambda x: [x]], ids=["dict", "list"])
def test_what_a_forward_takes_out_of_a_container_is_there_again(put: Callable[[Tensor], Any], reads: Reads) -> None:
    found = run(TakesOut(), reads, lambda model, x: model(put(x)).mean())
    assert said(found).startswith("Reproduced")
    assert operation(found).module == "part"


class Waits(nn.Module):
    """Runs its part while it holds a lock, which no second forward could get."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.part, self.held = Divided(), held

    def forward(self, x: Tensor) -> Tensor:
        with self.held["lock"] if isinstance(self.held, dict) else self.held:
            found: Tensor = self.part(x)
        return found


@both
@pytest.mark.parametrize(
    "made",
    [
        threading.Lock,
        threading.Semaphore,
        lambda: threading.Condition(threading.Lock()),
        lambda: {"lock": threading.Lock()},
    ],
    ids=["lock", "semaphore", "condition", "in a dict"],
)
def test_a_replay_does_not_wait_for_a_lock_that_the_forward_holds(made: Callable[[], Any], reads: Reads) -> None:
    model = Waits(made())
    held = model.held
    assert said(run(model, reads, mean)).startswith("Reproduced")
    assert model.held is held
    with held["lock"] if isinstance(held, dict) else held:
        pass


class Counts(Divided):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.by_name = np.zeros(2), {"calls": np.zeros(2)}

    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.by_name["calls"][0] += 1
        return x


@both
def test_arrays_of_numpy_are_put_back(reads: Reads) -> None:
    model = Counts()
    assert run(model, reads, mean) is not None
    assert model.calls.tolist() == [5.0, 5.0]
    assert model.by_name["calls"].tolist() == [5.0, 0.0]
