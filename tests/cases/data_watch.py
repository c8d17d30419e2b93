"""Loops that train on other data than they seem to, and their healthy twins, as data.

`CASES` holds them by kind: `case.make()` gives a model, an optimizer, and the loop to run inside of a Guardian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gpt_guard.callbacks.data.guard import DataWatch
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

FEATURES, CLASSES, ROWS = 6, 3, 16
Run = Callable[[Guardian], None]


class Loop(NamedTuple):
    """What `make` gives; `options` are those of DataWatch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Run
    options: dict[str, Any] = {}  # noqa: RUF012  # of a named tuple; never written to


class Case(NamedTuple):
    """`code` is None for a healthy twin; `cause` is a piece of the first cause, `line` one of the line that is named.

    `noted` are the codes of notes (severity info) that are left, and no more than these.
    """

    name: str
    kind: str
    make: Callable[[], Loop]
    code: str | None = None
    cause: str = ""
    line: str = ""
    noted: tuple[str, ...] = ()


CASES: list[Case] = []
Make = Callable[[], Loop]


def bug(kind: str, code: str, cause: str, line: str = "") -> Callable[[Make], Make]:
    """Note a loop with a bug."""

    def note(make: Make) -> Make:
        CASES.append(Case(make.__name__, kind, make, code, cause, line))
        return make

    return note


def healthy(kind: str, *noted: str) -> Callable[[Make], Make]:
    """Note a healthy twin."""

    def note(make: Make) -> Make:
        CASES.append(Case(make.__name__, kind, make, noted=noted))
        return make

    return note


def findings(case: Case, reads: Any = "immediate") -> list[Finding]:
    """What DataWatch says of a case."""
    torch.manual_seed(0)
    loop = case.make()
    guard = DataWatch(**loop.options)
    with Guardian(loop.model, loop.optimizer, guards=[guard], sinks=[], reads=reads) as guardian:
        loop.run(guardian)
    return list(guardian.findings)


def small(inputs: int = FEATURES, outputs: int = CLASSES) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def samples(count: int = 200) -> tuple[Tensor, Tensor]:
    """Inputs and labels that can be learned from them."""
    x = torch.randn(count, FEATURES)
    return x, x[:, :CLASSES].argmax(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """One step."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def over(batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], **options: Any) -> Loop:
    """Train on batches."""
    model, optimizer = small()

    def run(guardian: Guardian) -> None:
        for x, y in batches():
            train(model, optimizer, x, y)

    return Loop(model, optimizer, run, options)


def loader(count: int = 200, rows: int = ROWS, **options: Any) -> DataLoader[Any]:
    """A loader of samples."""
    return DataLoader(TensorDataset(*samples(count)), batch_size=rows, **options)
