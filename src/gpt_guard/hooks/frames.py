"""Find the line of the user's own code that led here."""

from __future__ import annotations

import linecache
import os
import sys

import torch

from gpt_guard.records import SourceLine

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def user_line() -> SourceLine | None:
    """The innermost frame outside of torch, the standard library and gpt_guard, or None.

    A frame in a third-party package counts as the user's: a model from there is the model that fails. Walks frames
    without building a traceback, so it may run on every call of `.train()`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            text = linecache.getline(file, frame.f_lineno).strip()
            return SourceLine(file=file, line=frame.f_lineno, function=frame.f_code.co_name, text=text)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _is_foreign(file: str) -> bool:
    if file.startswith((_OURS, _TORCH)) or file.startswith("<frozen"):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file
