"""Does the loop draw its batches at random? The same batch each time is then a fault; else it may be all there is."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

from gpt_guard.hooks.functions.function_calls import FunctionCall


class Draws:
    """Notes what tells that rows are drawn: torch's own calls in inspected steps, or a generator that has moved.

    A generator that is seeded in the function that draws stands at the same place in each step; but it moved, or was
    set, between the start of the watch and the first forward. One of the user's own that torch does not draw from
    (`numpy.random.default_rng(0)`) leaves no trace.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = _generators()

    def forward_begins(self) -> None:
        """A forward in training begins; only the first one is looked at."""
        if self._before is not None:
            self.seen = self.seen or _generators() != self._before
            self._before = None

    def called(self, call: FunctionCall) -> None:
        """A function was called that draws whole numbers, which may be places in the data."""
        self.seen = True


def _generators() -> tuple[Any, ...]:
    """Where the shared generators of Python, torch (CPU) and numpy, if it is loaded, stand."""
    numpy = sys.modules.get("numpy")
    known = None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        known = (kind, keys.tobytes(), *rest)
    state = torch.get_rng_state().untyped_storage()
    # The bytes of a CPU tensor: nothing is read from a device.
    return random.getstate(), ctypes.string_at(state.data_ptr(), state.nbytes()), known
