"""What the tests of chains share: a tap whose forwards are light after the first, and small nets to spoil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.hooks.forward import ForwardTap

WIDTH = 8


class Tap(ForwardTap):
    """Learns from its first forward; those that follow are light. `bad` are the outputs that failed the cheap test."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, immediate=True)
        self.bad: list[tuple[str, bool]] = []
        self.open(self)
        self.watch_outputs(lambda index, _position, _tensor, _entering, link: self.told(index, link))
        self.finish_setup()

    def told(self, index: int, link: Any) -> None:
        self.bad.append((self.names[index], link is not None))

    def forward_begins(self) -> None:
        self.spare() if self.calls > 1 else self.learn()

    def forward_ended(self, output: Any) -> None:
        pass

    @property
    def known(self) -> set[str]:
        return {self.names[index] for index in self.succession.known}

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Block(nn.Module):
    """A pre-norm block without attention; `between` is what its own code does to the output of `up`."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.between: Callable[[Tensor], Tensor] = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.up(self.ln(x)))
        return x + self.drop(self.down(self.act(y)))  # type: ignore[no-any-return]  # a call of a module is Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))  # type: ignore[no-any-return]  # a call of a module is Any


class Parts(nn.Module):
    """Calls its parts as the given function says."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        self.run = run
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.run(self, x) * 1.0


def batch() -> Tensor:
    return torch.randn(5, WIDTH)


def spoil(module: nn.Module) -> None:
    """Finite weights whose products are not."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(3e38)
