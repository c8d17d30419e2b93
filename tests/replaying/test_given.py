"""What a forward changes in its inputs, or waits for, while it is still running."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from .divided import Divided, mean, run
from .steps import Reads, both, operation, said


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
