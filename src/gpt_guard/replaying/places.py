"""Where the program is: the user's line, the module that runs, and the forward operation behind a derivative."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint

from gpt_guard.hooks.frames import is_foreign, line_of, running_calls
from gpt_guard.records import Operand, SourceLine
from gpt_guard.replaying.memory import Maker
from gpt_guard.replaying.operations import word_for, word_for_node

_ENGINE = graph._engine_run_backward.__code__
_CHECKPOINT = checkpoint.__file__
# A write to a view makes two nodes after the operation itself.
_LATE = 2


class OperationPlace(NamedTuple):
    """The user's line, and path and class of the innermost module; no path for a module that is not the model's."""

    line: SourceLine | None
    module: str | None
    module_class: str | None


def user_frame() -> tuple[FrameType | None, Literal["forward", "inside", "backward"]]:
    """The innermost frame of the user's code, and how what runs stands to it.

    "forward": it runs as part of the frame's line, also where checkpointing runs a forward again in the backward.
    "inside": the same, for a hook or a custom autograd.Function that the backward calls. "backward": a derivative that
    autograd computes, and the frame, if any, is the one that has called `backward()`.
    """
    running = torch._C._current_graph_task_id() != -1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _ENGINE:
            # What is further out has called backward(): the rest of the walk only looks for its line.
            return _outside(frame.f_back), "backward"
        if not is_foreign(code.co_filename):
            return frame, "inside" if running and not _recomputes(frame) else "forward"
        frame = frame.f_back
    # On an accelerator the backward runs in a thread of its own, in which the call of backward() does not stand.
    return None, "backward" if running else "forward"


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _recomputes(frame: FrameType | None) -> bool:
    """Whether checkpointing stands between a frame and the backward."""
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


class ModuleStack:
    """The stack of modules whose forward runs, for each thread; paths are those in the model.

    `output` is what the model itself has returned last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.output: Any = None
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stacks: dict[int, list[nn.Module]] = {}
        self._lines: dict[tuple[str, int], tuple[str | None, str | None]] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin to follow calls of modules, with hooks that torch runs for every module."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stacks.clear()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._stacks.setdefault(threading.get_ident(), []).append(module)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if module is self.model:
            self.output = output
        stack = self._stacks.get(threading.get_ident(), [])
        # A forward that raised has left modules above it on the stack.
        while stack and stack.pop() is not module:
            continue

    def here(self) -> tuple[str | None, str | None]:
        """Path and class name of the innermost module that runs and is the model's; that of a foreign one if none is.

        A foreign module inside of one of the model's, such as a loss made in forward, counts as its part.
        """
        stack = self._stacks.get(threading.get_ident(), [])
        for module in reversed(stack):
            path = self._paths.get(id(module))
            if path is not None:
                return path, type(module).__name__
        return None, type(stack[-1]).__name__ if stack else None

    def at(self, line: SourceLine) -> tuple[str | None, str | None]:
        """The same for a line of code; one that checkpointing runs again outside of its module keeps its module."""
        found = self.here()
        if found[0] is not None:
            self._lines.setdefault((line.file, line.line), found)
        elif torch._C._current_graph_task_id() != -1:
            found = self._lines.get((line.file, line.line), found)
        return found

    def method(self) -> tuple[str | None, str | None]:
        """The same read off the Python stack, which also shows a method that was called in place of its module."""
        for call in running_calls():
            path = self._paths.get(id(call.module))
            if path is not None:
                return path, type(call.module).__name__
        return None, None


def place_of(frame: FrameType | None, modules: ModuleStack) -> OperationPlace:
    """The place at which a frame stands."""
    if frame is None:
        return OperationPlace(None, *modules.here())
    line = line_of(frame)
    return OperationPlace(line, *modules.at(line))


@dataclass(frozen=True, slots=True)
class Hazard:
    """Values at which an operation is finite, or masked later, and its derivative is not; `key` names the cause."""

    operand: Operand
    shows: str
    key: str


@dataclass(frozen=True, slots=True)
class ForwardOperation:
    """An operation of the forward, as far as its derivative may need it."""

    base: str
    place: OperationPlace
    maker: Maker
    hazard: Hazard | None = None


class GraphNodes:
    """What each node of the graph stands for, for each thread: so a step of the backward finds the user's line.

    Autograd numbers its nodes as they are made. An operation is seen right after its node was, so the newest number is
    that of its own node; one that makes no node finds the number taken.
    """

    def __init__(self) -> None:
        self._made: dict[int, dict[int, ForwardOperation]] = {}

    def note(self, forward: ForwardOperation) -> None:
        """Record the operation that has just been dispatched, in the thread that called it."""
        self._made.setdefault(threading.get_ident(), {}).setdefault(_newest(), forward)

    def free(self) -> bool:
        """Whether the newest node of this thread has no operation yet."""
        return _newest() not in self._made.get(threading.get_ident(), {})

    def of(self, node: Any) -> ForwardOperation | None:
        """The operation that a node is the derivative of; None if it was made before the trace, or unseen."""
        number, word = node._sequence_nr(), word_for_node(node.name())
        here = threading.get_ident()
        threads = sorted(self._made.items(), key=lambda item: item[0] != here)
        found = [made[number] for _, made in threads if number in made]
        named = [forward for forward in found if word_for(forward.base) == word]
        if named or found:
            return (named or found)[0]
        if node.name().startswith(("CopySlices", "AsStrided")):
            late = (made.get(number - back) for back in range(1, _LATE + 1) for _, made in threads)
            return next((forward for forward in late if forward is not None), None)
        return None


def _newest() -> int:
    return int(torch._C._autograd._get_sequence_nr()) - 1


def current_node() -> Any:
    """The node of the graph that the running backward computes; None outside of a backward."""
    return torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
