"""Which operations of a forward write to a tensor that was there before, and on which lines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_guard.hooks.frames import running_module, user_line
from gpt_guard.records import SourceLine
from gpt_guard.replaying.step_runner import StepRunner


class InPlaceWrite(NamedTuple):
    """An operation, the path of the module whose code called it, its line, and the shape of what it wrote to."""

    operation: str
    path: str
    line: SourceLine | None
    shape: tuple[int, ...]


class _Writes(TorchDispatchMode):
    """Notes the in-place operations on tensors that a backward may need."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._paths = paths
        self.found: list[InPlaceWrite] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1] if "." in str(func) else str(func)
        # aten's own rule of names: what ends in one underscore writes to its first argument.
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
            running = running_module(self._paths.keys())
            path = "" if running is None else self._paths[id(running)]
            self.found.append(InPlaceWrite(name, path, user_line(), tuple(args[0].shape)))
        return result


def in_place_writes(run: StepRunner) -> list[InPlaceWrite]:
    """Run a forward again and list what it writes in place, in order. Leaves nothing behind, as a replay does."""
    paths: dict[int, str] = {}
    for path, module in run.plain.named_modules():
        paths.setdefault(id(module), path)
    writes = _Writes(paths)
    with run.traced(run.starts), writes, torch.enable_grad():
        run.call()
    return writes.found


def named(model: nn.Module, path: str) -> str:
    """A module in words."""
    return f"`{path}` ({type(model.get_submodule(path)).__name__})" if path else f"the model ({type(model).__name__})"
