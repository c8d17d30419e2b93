"""Where float16 is in play: in the model, in the graph behind a tensor, in autocast, by a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.autograd_graph.half import no_half
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

Make = Callable[[nn.Module, Tensor], Tensor]


class Keeping(Guard):
    """Keeps what guards are given."""

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self.given = watch

    def judge(self, seen: Observation) -> Iterable[Finding]:
        return ()


def answer(make: Make, model: nn.Module | None = None, context: Any = None, reads: Any = "immediate") -> bool:
    """What `no_half` says of the tensor that `make` gives, asked outside of the context in which it was made."""
    model = model or nn.Linear(4, 4)
    guard = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[guard], sinks=[], reads=reads):
        with context or nullcontext():
            tensor = make(model, torch.randn(2, 4))
        return no_half(guard.given, tensor)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return torch.log(model(x).float().square()).sum()


@torch.no_grad()
def without_graph(model: nn.Module, x: Tensor) -> Tensor:
    return loss(model, x)


def half(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: answer(loss), True),
        (lambda: answer(loss, reads="per_step"), True),
        (lambda: answer(loss, context=half(torch.bfloat16)), True),
        (lambda: answer(loss, context=half(torch.float16)), False),
        (lambda: answer(lambda model, x: model(x).half().float().sum()), False),
        (lambda: answer(lambda model, x: torch.zeros(3), nn.Linear(4, 4).half()), False),
        (lambda: answer(without_graph), True),
        (lambda: answer(without_graph, reads="per_step"), False),
    ],
    ids=["float32", "late", "bfloat16", "autocast", "cast in between", "weights", "no graph", "no graph, late"],
)
def test_what_speaks_of_float16(made: Callable[[], bool], expected: bool) -> None:
    assert made() is expected


def test_autocast_that_is_on_now() -> None:
    model, guard = nn.Linear(4, 4), Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[guard], sinks=[]):
        with half(torch.float16):
            assert not no_half(guard.given, torch.zeros(2))
        assert no_half(guard.given, torch.zeros(2))
        assert not no_half(guard.given, None)
        guard.given.scaling = True
        assert not no_half(guard.given, torch.zeros(2))
