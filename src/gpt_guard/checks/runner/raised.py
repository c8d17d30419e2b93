"""An exception in a check, as a finding: what was raised, at which line of the user's code, and what that means."""

from __future__ import annotations

import linecache
import os
import traceback
from types import TracebackType

import torch

from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, SourceLine

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("memory", ("out of memory", "not enough memory", "can't allocate")),
    ("device", ("same device", "found at least two devices", "expected all tensors", "cuda:0 and cpu")),
    ("range", ("index out of range", "out of bounds", "device-side assert", "indexselect")),
    ("in_place", ("inplace operation", "backward through the graph a second time")),
    ("no_graph", ("does not require grad", "no grad_fn")),
    ("dtype", ("dtype", "scalar type", "tensor of type", "not implemented for")),
    ("shape", ("shape", "size", "dimension", "mat1 and mat2", "view", "broadcast")),
    ("call", ("positional argument", "keyword argument", "not callable", "no attribute", "no logits were found")),
)
"""What torch and Python write in the messages of these errors (torch 2.13), the surest first."""


def raised(error: BaseException, doing: str) -> Finding:
    """GG610 for an exception that came out of a check; the traceback's innermost line of the user's is its place."""
    message = " ".join(str(error).split())
    where = user_line(error.__traceback__)
    # The project raised by itself where its own line is the last of the traceback; otherwise torch refused its call.
    if where is None:
        likely = ["check", *_likely(message)]
    elif _innermost(error.__traceback__) == (where.file, where.line) and isinstance(
        error, (ValueError, AssertionError)
    ):
        likely = ["own_error", *_likely(message)]
    else:
        likely = _likely(message) or ["call"]
    seen = f"{doing}: {type(error).__name__}: {message[:400]}"
    evidence = {"exception": type(error).__name__, "message": message[:2000]}
    return finding("GG610", seen, likely=likely, where=where, evidence=evidence, cause_id=doing)


def user_line(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of a traceback outside of torch, the standard library and gpt_guard, or None."""
    for frame in reversed(traceback.extract_tb(trace)):
        foreign = frame.filename.startswith((_OURS, _TORCH, "<frozen"))
        in_library = frame.filename.startswith(_STDLIB) and "site-packages" not in frame.filename
        if not foreign and not in_library:
            line = frame.lineno or 0
            text = linecache.getline(frame.filename, line).strip()
            return SourceLine(file=frame.filename, line=line, function=frame.name, text=text)
    return None


def _innermost(trace: TracebackType | None) -> tuple[str, int]:
    frames = traceback.extract_tb(trace)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def _likely(message: str) -> list[str]:
    text = message.lower()
    return [key for key, signs in _SIGNS if any(sign in text for sign in signs)]
