from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_guard.records import Finding
from mini_gpt import MiniGPT, MiniGPTConfig

CHARS = sorted("\n abcdefghijk")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "latest.pt"


@pytest.fixture
def build() -> Callable[..., MiniGPT]:
    """Make a small MiniGPT of other sizes or seed."""

    def make(seed: int = 0, **sizes: Any) -> MiniGPT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            given = {"vocab_size": len(CHARS), "block_size": 8, "embedding_dim": 16, "num_heads": 2, **sizes}
            return MiniGPT(MiniGPTConfig(**given))

    return make


@pytest.fixture
def train() -> Callable[..., list[float]]:
    """Take real steps on random tokens; returns the losses."""

    def run(model: MiniGPT, optimizer: torch.optim.Optimizer, steps: int = 3, scheduler: Any = None) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, model.config.vocab_size, (4, 9))
            optimizer.zero_grad()
            _, loss = model(ids[:, :-1], ids[:, 1:])
            assert loss is not None
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
        return losses

    return run


class Untouched:
    """Asserts that a model and optimizers are bit for bit what they were."""

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers
        self._before = self._flat()

    def _flat(self) -> list[Any]:
        states: list[Any] = [self._model.state_dict(), *(one.state_dict() for one in self._optimizers)]
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in _leaves(states)]

    def check(self) -> None:
        now = self._flat()
        assert len(now) == len(self._before)
        for ours, before in zip(now, self._before, strict=True):
            if isinstance(ours, Tensor):
                assert torch.equal(ours, before)
            else:
                assert ours == before


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _leaves(value)]
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in _leaves(value)]
    return [state]


@pytest.fixture
def untouched() -> type[Untouched]:
    return Untouched


@pytest.fixture
def reported() -> list[Finding]:
    """A list whose `append` serves as on_finding."""
    return []
