"""Objects that are no containers, and that a forward may change: generators of random numbers, and arrays of numpy."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# An array that counts or averages is small; one that holds data is only read.
_MOST_BYTES = 16 * 2**20


def reset_of(value: Any) -> Callable[[], object] | None:
    """What puts a generator of random numbers, or an array of numpy that is not large, back to what it is now.

    None for anything else.
    """
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        if bits is not None:
            numbers = bits.state
            return lambda: setattr(bits, "state", numbers)
    if type(value).__module__ == "numpy" and getattr(value, "nbytes", _MOST_BYTES) < _MOST_BYTES and value.ndim:
        return partial(_write, value, value.copy())
    return None


def _write(array: Any, values: Any) -> None:
    if array.flags.writeable:
        array[...] = values
