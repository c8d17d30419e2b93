"""What the Python stack tells: the line of the user's own code that led here, and the modules that are running.

Both are exact however modules are shared, stored or called, and cost nothing until they are asked for.
"""

from __future__ import annotations

import linecache
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.tensors import walk
from gpt_guard.records import SourceLine

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# Where packages are installed below the standard library's own folder; Debian has a name of its own.
_PACKAGES = ("site-packages", "dist-packages")
# Code without a file that is nobody's line: the import system, and forwards written by torch.fx.
_NO_FILE = ("<frozen ", "<eval_with_key>")
_CALL = nn.Module._call_impl.__code__


def user_line() -> SourceLine | None:
    """The innermost frame outside of torch, the standard library and gpt_guard, or None.

    A frame in a third-party package counts as the user's: a model from there is the model that fails. Walks frames
    without building a traceback, so it may run on every call of `.train()`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            return SourceLine(file=file, line=frame.f_lineno, function=frame.f_code.co_name, text=text)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _is_foreign(file: str) -> bool:
    if file.startswith((_OURS, _TORCH, *_NO_FILE)):
        return True
    return file.startswith(_STDLIB) and not any(part in file for part in _PACKAGES)


class Call(NamedTuple):
    """A module that is running, and what it was called with; None where one of its methods was called, not itself."""

    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None


def running_calls() -> list[Call]:
    """The modules whose code is running in this thread, innermost first. Walks all frames: only after a failure."""
    found: list[Call] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            inside = frame.f_locals
            module = inside["self"]
            # The frames of its forward came before: they stand for the same call.
            if found and found[-1].module is module and found[-1].inputs is None:
                found.pop()
            found.append(Call(module, (inside["args"], inside["kwargs"])))
        elif code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module) and not (found and found[-1].module is first):
                found.append(Call(first, None))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return found


def passed_from_outside(model: nn.Module, tensor: Tensor) -> bool:
    """Whether code that runs outside of all modules of a model holds this very tensor in a local variable.

    True for what a loop has passed on to a method of the model, False for what the method has computed from it.
    """
    modules = {id(module) for module in model.modules()}
    outside: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if _is_foreign(frame.f_code.co_filename) or not (first and id(frame.f_locals.get(first[0])) in modules):
            outside.append(frame.f_locals)
        else:
            # Whatever ran further inside was called by this method.
            outside.clear()
        if frame.f_back is None:
            break
        frame = frame.f_back
    return any(found is tensor for names in outside for _, found in walk(names))
