"""What the Python stack tells: the line of the user's own code that led here, and the modules that are running.

Both are exact however modules are shared, stored or called, and cost nothing until they are asked for.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Container, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.hooks.tensors import walk
from gpt_guard.records import SourceLine

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CASEBOOK = os.path.join(_OURS, "casebook", "case_")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# Where packages are installed below the standard library's own folder; Debian has a name of its own.
_PACKAGES = ("site-packages", "dist-packages")
# What owns a loop on the user's behalf: the line that it was given is theirs, not the one in here that calls it.
_TRAINERS = tuple(
    os.path.join(packages, *name.split("/"))
    for packages in _PACKAGES
    for name in (
        "accelerate/",
        "ignite/",
        "lightning/",
        "lightning_fabric/",
        "pytorch_lightning/",
        "transformers/trainer",
    )
)
# Code without a file that is nobody's line: the import system, and forwards written by torch.fx.
_NO_FILE = ("<frozen ", "<eval_with_key>")
_CALL = nn.Module._call_impl.__code__
# Of what a failed call was given, so many tensors are told.
_MOST_TENSORS = 6


def user_line() -> SourceLine | None:
    """The innermost frame outside of torch, the standard library and gpt_guard, or None.

    A frame in a third-party package counts as the user's: a model from there is the model that fails; but not one in a
    trainer. Walks frames without building a traceback, so it may run on every call of `.train()`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_foreign(file):
            return line_of(frame)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def caller_line(module: nn.Module) -> SourceLine | None:
    """The line of the user's that has called a running module, wherever inside this is asked; None if none has."""
    frame: FrameType | None = sys._getframe(1)
    found: FrameType | None = None
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is module:
            found = frame
        frame = frame.f_back
    while found is not None and is_foreign(found.f_code.co_filename):
        found = found.f_back
    return None if found is None else line_of(found)


def line_of(frame: FrameType, number: int | None = None) -> SourceLine:
    """The line at which a frame stands, or the one with this number."""
    code, number = frame.f_code, frame.f_lineno if number is None else number
    text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return SourceLine(file=code.co_filename, line=number, function=code.co_name, text=text)


def is_foreign(file: str) -> bool:
    """Whether a file is torch's, the standard library's, a trainer's or gpt_guard's, and so no line of the user's."""
    if file.startswith((_OURS, _TORCH, *_NO_FILE)):
        # The scripts of the casebook stand for the user's.
        return not file.startswith(_CASEBOOK)
    if any(part in file for part in _PACKAGES):
        return any(trainer in file for trainer in _TRAINERS)
    return file.startswith(_STDLIB)


class Call(NamedTuple):
    """A module that is running, and what it was called with; None where one of its methods was called, not itself."""

    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None


def running_calls() -> list[Call]:
    """The modules whose code is running in this thread, innermost first. Walks all frames: only after a failure."""
    found: list[Call] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            inside = frame.f_locals
            module = inside["self"]
            # The frames of its forward came before: they stand for the same call.
            if found and found[-1].module is module and found[-1].inputs is None:
                found.pop()
            found.append(Call(module, (inside["args"], inside["kwargs"])))
        elif (module := _method_of(frame)) is not None and not (found and found[-1].module is module):
            found.append(Call(module, None))
        frame = frame.f_back
    return found


def running_module(among: Container[int] | None = None) -> nn.Module | None:
    """The innermost module that is being called, of those whose id is `among` the given ones; None outside of any.

    Looks into frames of torch's own only: those end with the call, while the copy of its variables that a look leaves
    in a frame of the user's would hold their batch and its graph for as long as their loop runs.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            module: nn.Module = frame.f_locals["self"]
            if among is None or id(module) in among:
                return module
        if frame.f_back is None:
            return None
        frame = frame.f_back


def _method_of(frame: FrameType) -> nn.Module | None:
    """The module that a frame runs a method of; a function that is given a module, as `train(model)`, is no method."""
    code = frame.f_code
    # Reading the variables of a frame leaves a copy of them in it, which keeps a model alive: only where it can matter.
    if not code.co_argcount or code.co_qualname.rpartition(".")[0].rpartition(".")[2] in ("", "<locals>"):
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    if not isinstance(first, nn.Module):
        return None
    owner = code.co_qualname.rpartition(".")[0].rpartition(".")[2]
    return first if any(kind.__name__ == owner for kind in type(first).__mro__) else None


def runs_in(code: CodeType) -> bool:
    """Whether a function with this code is running in this thread; looks at no variable."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False


class Running(NamedTuple):
    """Where the user's own code of a running module is: the line, and its local variables."""

    line: SourceLine | None
    variables: dict[str, Any]


def inside_of(module: nn.Module) -> Running:
    """The innermost frame of a running module's own code; no line and no variables if it is torch's code."""
    frame = sys._getframe(1)
    while frame is not None:
        if _method_of(frame) is module and not is_foreign(frame.f_code.co_filename):
            return Running(line_of(frame), dict(frame.f_locals))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Running(None, {})


def passed_from_outside(model: nn.Module, tensor: Tensor) -> bool:
    """Whether code that runs outside of all modules of a model holds this very tensor in a local variable.

    True for what a loop has passed on to a method of the model, False for what the method has computed from it.
    """
    modules = {id(module) for module in model.modules()}
    outside: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None:
        if is_foreign(frame.f_code.co_filename) or id(_method_of(frame)) not in modules:
            outside.append(frame.f_locals)
        else:
            # Whatever ran further inside was called by this method.
            outside.clear()
        if frame.f_back is None:
            break
        frame = frame.f_back
    return any(found is tensor for names in outside for _, found in walk(names))


def function_line(function: Callable[..., Any]) -> SourceLine | None:
    """The first line of a function, of what a partial or a wrapper calls, or of an object's `__call__`.

    None for what is not written in Python.
    """
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLine(file=code.co_filename, line=code.co_firstlineno, function=code.co_name, text=text)


class RaisedIn(NamedTuple):
    """Where an exception came from; no tensor and no frame is in it but those of the call, for as long as it is held.

    `path` is that of the innermost module of the model, None where none was running; `given` what it was called with;
    `line` the innermost line of the user's own code; `optimizer` the one whose step was running.
    """

    path: str | None
    module: nn.Module | None
    given: tuple[tuple[str, Tensor], ...]
    line: SourceLine | None
    optimizer: Optimizer | None


def raised_in(trace: TracebackType | None, paths: dict[int, str]) -> RaisedIn:
    """Read a traceback from its end; `paths` are those of the model's modules, by id."""
    path: str | None = None
    module: nn.Module | None = None
    given: tuple[tuple[str, Tensor], ...] = ()
    line: SourceLine | None = None
    optimizer: Optimizer | None = None
    for frame, number in reversed(list(_frames(trace))):
        code = frame.f_code
        if line is None and not is_foreign(code.co_filename):
            line = line_of(frame, number)
        # Reading the variables of a frame of the user's would leave a copy of them in it.
        if module is None and code is _CALL and id(first := frame.f_locals["self"]) in paths:
            module, path = first, paths[id(first)]
            given = tuple(walk({**dict(enumerate(frame.f_locals["args"])), **frame.f_locals["kwargs"]}))[:_MOST_TENSORS]
        if optimizer is None and code.co_name == "step" and code.co_varnames[:1] == ("self",):
            owner = frame.f_locals["self"]
            optimizer = owner if isinstance(owner, Optimizer) else None
    return RaisedIn(path, module, given, line, optimizer)


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def tensor_in_words(position: str, tensor: Any) -> str:
    """A tensor by shape, dtype and device; nothing of it is read."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{position} {list(tensor.shape)} {kind} on {tensor.device}"
