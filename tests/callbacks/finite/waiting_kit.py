"""What the tests of waiting outputs share: a net with chains, a loop that breaks in a light step, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.hooks.pace import Pace

WIDTH = 8
FAULT = 6
Fault = Callable[[Any], object]


class Block(nn.Module):
    """A pre-norm block; `scale` is multiplied to its input, `between` acts on the output of `up`."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.scale, self.between = 1.0, nothing

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        y = self.ln(x)
        y = self.up(y)
        y = self.between(y)
        y = self.act(y)
        y = self.down(y)
        return x + self.drop(y)  # type: ignore[no-any-return]  # a call of a module is Any


def nothing(y: Tensor) -> Tensor:
    return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])
        self.seq = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        x = self.seq(x)
        x = self.drop(x)
        return self.head(x)  # type: ignore[no-any-return]  # a call of a module is Any


def train(model: nn.Module, fault: Fault, steps: int = FAULT + 4, guardians: int = 1) -> Generator[int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ExitStack() as entered:
        for _ in range(guardians):
            guardian = Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], replay=False)
            entered.enter_context(guardian)
        for step in range(steps):
            assert guardian._session is not None
            if step == FAULT:
                assert guardian._session.watch.pace.full is (step < Pace.first)
            if step == FAULT:
                fault(model)
            optimizer.zero_grad()
            model(torch.randn(5, WIDTH)).square().mean().backward()
            optimizer.step()
            yield step


def halted(model: nn.Module, fault: Fault, guardians: int = 1) -> Finding:
    with pytest.raises(NonFiniteError) as halt:
        list(train(model, fault, guardians=guardians))
    return halt.value.finding


def told(found: Finding) -> tuple[Any, ...]:
    assert found.where is not None
    return found.code, found.step, found.module, found.evidence.get("received_by"), found.where.text


def spoil(path: str) -> Fault:
    """Finite weights whose products are not."""

    def fault(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.get_submodule(path).parameters():
                parameter.fill_(3e38)

    return fault


def setting(path: str, name: str, value: Any) -> Fault:
    return lambda model: setattr(model.get_submodule(path), name, value)
