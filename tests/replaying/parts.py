"""What the tables of faults share: a net whose part is one function, and what is to be told of it.

The function is the forward of a module `part`, given the output of a linear layer, [3, 4], in some dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.records import OperationSeen
from gpt_guard.replaying.trace import Trace

INF, NAN = float("inf"), float("nan")
MARK = "# fault"
ALL = (torch.float32, torch.bfloat16, torch.float16)
FULL = (torch.float32,)
HALF = (torch.float16,)


class Part(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Net(nn.Module):
    """A linear layer, then the function under test in the dtype under test."""

    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.part = Part(function)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(self.lin(x).to(self.dtype))
        return out


class Fault(NamedTuple):
    """What is to be told of a function: the word, the likeliest cause, the phase, the dtypes in which it fails."""

    function: Callable[[Tensor], Tensor]
    word: str
    cause: str
    phase: str = "forward"
    dtypes: tuple[torch.dtype, ...] = ALL

    @property
    def line(self) -> int:
        """The number of the marked line."""
        source, first = inspect.getsourcelines(self.function)
        return first + next(i for i, text in enumerate(source) if text.rstrip().endswith(MARK))


def traced(function: Callable[[Tensor], Any]) -> tuple[Any, Trace]:
    """The output of a net whose part is `function`."""
    with Trace(model := Net(function)) as trace:
        out = model(torch.randn(3, 4))
    assert trace.skipped == {}
    return out, trace


def origin_of(function: Callable[[Tensor], Tensor]) -> OperationSeen | None:
    out, trace = traced(function)
    return trace.origin(out)
