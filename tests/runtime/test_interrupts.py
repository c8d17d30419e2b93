"""A Ctrl-C or an exception at any line of entry and exit leaves torch, the model and all generators as they were."""

from __future__ import annotations

import copyreg
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import gpt_guard
from gpt_guard import Guardian

OWN = os.path.dirname(gpt_guard.__file__) + os.sep
OWNERS: list[Any] = [
    torch,
    torch.Tensor,
    torch.autograd,
    torch.nn.functional,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    torch.jit._recursive,
    LRScheduler,
    DataLoader,
]
Line = tuple[str, int]


class Boom(Exception):
    """Stands for anything that may go wrong."""


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Guardian]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, Guardian(model, optimizer, sinks=[], summary=False)


def as_it_is(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a Guardian may change: attributes of torch, hooks, modes and generators."""
    found: dict[str, Any] = {
        f"{owner.__name__}.{name}": value
        for owner in OWNERS
        for name, value in vars(owner).items()
        if callable(value) and not isinstance(value, type)
    }
    found |= {f"copyreg.{kind.__name__}": reducer for kind, reducer in copyreg.dispatch_table.items()}
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": list(value) for name, value in vars(module).items() if name.endswith("_hooks")}
        found[f"{path}.training"] = module.training
    found |= {name: list(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    found["grad mode"] = torch.is_grad_enabled()
    found["function modes"] = torch._C._len_torch_function_stack()
    found["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    found["generators"] = (random.getstate(), torch.get_rng_state().tolist())
    return found


def at(line: Line, error: type[BaseException]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises once, where this line is about to run."""
    left = [True]

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and left[0] and frame.f_lineno == line[1] and frame.f_code.co_filename == line[0]:
            left[0] = False
            raise error
        return local

    return lambda frame, _event, _arg: local if frame.f_code.co_filename == line[0] else None


def lines_of(act: Callable[[], Any]) -> list[Line]:
    """The lines of gpt_guard that run in it, each once, in order."""
    found: dict[Line, None] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_filename, frame.f_lineno] = None
        return local

    sys.settrace(lambda frame, _event, _arg: local if frame.f_code.co_filename.startswith(OWN) else None)
    try:
        act()
    finally:
        sys.settrace(None)
    return list(found)


def interrupted(act: Callable[[], Any], line: Line, error: type[BaseException]) -> bool:
    """Whether the error came out of it; a guard's own failure is caught and told of."""
    sys.settrace(at(line, error))
    try:
        act()
    except BaseException as raised:
        return isinstance(raised, error)
    finally:
        sys.settrace(None)
    return False


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def named(line: Line) -> str:
    return f"{Path(line[0]).relative_to(OWN)}:{line[1]}"


def entries() -> Iterator[Line]:
    _model, _optimizer, guardian = parts()
    yield from lines_of(guardian.__enter__)
    guardian.stop()


def exits() -> Iterator[Line]:
    model, optimizer, guardian = parts()
    guardian.start()
    steps(model, optimizer)
    yield from lines_of(lambda: guardian.__exit__(None, None, None))


@pytest.fixture(autouse=True)
def loaded() -> None:
    """What is imported when a Guardian first runs has nothing to do with it."""
    model, optimizer, guardian = parts()
    with guardian:
        steps(model, optimizer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Boom])
def test_an_entry_that_is_interrupted_at_any_line_leaves_no_trace(error: type[BaseException]) -> None:
    left: dict[str, list[str]] = {}
    lines = list(entries())
    assert len(lines) > 300
    for line in lines:
        model, optimizer, guardian = parts()
        before = as_it_is(model, optimizer)
        if interrupted(guardian.__enter__, line, error) and (found := left_behind(before, as_it_is(model, optimizer))):
            left[named(line)] = found
        guardian.stop()
        if found := left_behind(before, as_it_is(model, optimizer)):
            left[named(line)] = found
    assert not left


@pytest.mark.parametrize("error", [KeyboardInterrupt, Boom])
def test_an_exit_that_is_interrupted_at_any_line_leaves_no_trace_once_it_is_stopped(
    error: type[BaseException],
) -> None:
    left: dict[str, list[str]] = {}
    lines = list(exits())
    assert len(lines) > 100
    for line in lines:
        model, optimizer, guardian = parts()
        before = as_it_is(model, optimizer)
        guardian.start()
        steps(model, optimizer)
        interrupted(lambda: guardian.__exit__(None, None, None), line, error)  # noqa: B023  # called at once
        guardian.stop()
        if found := left_behind(before, as_it_is(model, optimizer)):
            left[named(line)] = found
    assert not left
