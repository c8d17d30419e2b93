"""Figures and places of a replay, in words."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from typing import Any

from torch import Tensor

from gpt_guard.hooks.tensors import walk
from gpt_guard.replaying.values import many, measure


def figures(tensor: Tensor) -> str:
    """A number for a scalar; shape, dtype and range for anything larger. Reads the device."""
    if tensor.numel() == 1 and not tensor.is_complex():
        return f"{float(tensor.detach()):.6g}"
    stats = measure(tensor)
    kind = f"{stats.dtype} {list(stats.shape)}"
    if stats.bad:
        return f"non-finite in {stats.bad} of {many(stats.numel, 'element')} ({kind})"
    if stats.finite_min is None:
        return f"finite ({kind})"
    return f"finite ({kind}, between {stats.finite_min:.4g} and {stats.finite_max:.4g})"


def outputs_named(output: Any, positions: Collection[str]) -> str:
    """What the model returned at these positions."""
    told = [f"output{position} is {figures(tensor)}" for position, tensor in walk(output) if position in positions]
    return ", ".join(told[:4]) or f"it returned a {type(output).__name__}"


def place_of_error(error: BaseException) -> str:
    """The file and line in which an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
