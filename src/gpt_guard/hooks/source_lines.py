"""Where a function of the user's own is written."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import Any

from gpt_guard.records import SourceLine


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
