"""What tests of whole loops share: a net, a plain loop, and a sink that keeps what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Action, Finding, Guardian
from gpt_guard.records import Observation
from gpt_guard.sinks.base import Sink

STEPS = 60
Loop = Callable[[nn.Module, torch.optim.Optimizer], Iterator[int]]
Act = Callable[[int, nn.Module, torch.optim.Optimizer], None]


class Kept(Sink):
    """Keeps every observation and finding."""

    def observe(self, observation: Observation) -> None:
        self.seen.append(observation)

    def find(self, finding: Finding, action: Action) -> None:
        self.found.append((len(self.seen), finding))

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self.found: list[tuple[int, Finding]] = []


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))


def nothing(_step: int, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    return None


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], act: Act = nothing, clip: float = 0.1
) -> Iterator[int]:
    """A plain loop; `act` runs between backward and step, and the caller after each step."""
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        act(step, model, optimizer)
        optimizer.step()
        yield step


def watched(model: nn.Module, *, sink: Sink | None = None, **options: Any) -> tuple[Guardian, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Guardian(model, optimizer, sinks=[] if sink is None else [sink], **options), optimizer


def told(sink: Kept) -> list[tuple[str, int | None]]:
    return [(found.code, found.step) for _, found in sink.found]


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(16, 8), torch.randint(4, (16,))


def accumulating(parts_of: Callable[[int], int]) -> Loop:
    """A loop whose steps have so many micro-batches."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        for step in range(40):
            optimizer.zero_grad()
            parts = parts_of(step)
            for part in range(parts):
                x, y = batch(3 * step + part)
                (F.cross_entropy(model(x), y) / parts).backward()
            optimizer.step()
            yield step

    return loop
