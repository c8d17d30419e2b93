"""Refuse host reads by gpt_guard, on any machine: on an accelerator each would stall the device.

On the CPU a hidden `.item()` costs nothing and shows nowhere. Here it raises, so that a test without an accelerator
proves that a guard measures on the device and leaves the reading to the ledger.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt_guard.callbacks.base import Guard

_TESTING = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_TESTING)) + os.sep
_LEDGER = os.path.join(_PACKAGE, "hooks", "ledger.py")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# What needs a value, or a shape that depends on values, on the host.
_READS = frozenset(
    {"item", "tolist", "numpy", "cpu", "is_nonzero", "nonzero", "argwhere", "masked_select", "equal", "allclose"}
    | {"unique", "unique_consecutive", "bincount", "__bool__", "__int__", "__float__", "__complex__", "__index__"}
    | {"__array__", "__contains__", "__repr__", "__format__"}
)
_MASKS = (torch.bool, torch.uint8)


class HostReadError(AssertionError):
    """A value of a tensor was read by the host outside of the ledger; the message names the line."""


class HostReads(TorchFunctionMode):
    """Counts the ledger's reads in `ledger`, and refuses every other one that comes from inside of gpt_guard."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = 0
        self._last: FrameType | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs for every torch call in Python; passes it on unless it is a read of ours."""
        kwargs = kwargs or {}
        if _is_read(func, args, kwargs):
            self._judge(getattr(func, "__name__", str(func)))
        if func is Tensor.backward:
            # torch switches the mode off in here, and guards measure in the middle of it.
            with self:
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _judge(self, what: str) -> None:
        ours = _nearest_of_ours()
        if ours is None:
            return
        reading = _ledger_read(ours)
        if reading is not None:
            if reading is not self._last:
                self.ledger += 1
                self._last = reading
            return
        code = ours.f_code
        text = linecache.getline(code.co_filename, ours.f_lineno).strip()
        raise HostReadError(
            f"{what} reads a tensor's value at {code.co_filename}:{ours.f_lineno} in {code.co_name}: {text}\n"
            f"On an accelerator this stalls the device. Put the scalar into the ledger, "
            f"`self.watch.ledger.put(name, value)`, and look at it in `judge`, in `seen.readings`."
        )

    def forget(self) -> None:
        """Let go of the last frame seen."""
        self._last = None


def _backward(
    loss: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """What Tensor.backward does without a mode."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _is_read(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _READS:
        return True
    if name == "to":
        targets = [*args[1:], *kwargs.values()]
        return any(str(target) == "cpu" for target in targets if isinstance(target, (str, torch.device)))
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype in _MASKS for part in index)
    # where(condition) alone is nonzero.
    return name == "where" and len(args) + len(kwargs) == 1


def _nearest_of_ours() -> FrameType | None:
    """The frame of gpt_guard, or of a guard's method wherever it is written, that asked torch for it, or None."""
    frame: FrameType | None = sys._getframe(1)
    nearest, inside = True, None
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_filename.startswith((_TESTING, _TORCH)):
            pass
        elif code.co_filename.startswith(_PACKAGE):
            # Further out it stands around code of the user's own: a closure, a function that autograd calls.
            return frame if nearest and not _asked_for(frame) and not _stands_around(frame, inside) else None
        elif isinstance(first, Guard):
            return frame
        else:
            nearest = False
        inside, frame = frame, frame.f_back
    return None


def _stands_around(frame: FrameType, inside: FrameType | None) -> bool:
    """Whether a patch of ours only calls the function of torch that it replaces: what that one does is the loop's."""
    original = frame.f_locals.get("original")
    return inside is not None and getattr(original, "__code__", None) is inside.f_code


def _asked_for(frame: FrameType | None) -> bool:
    """Whether `guardian.log` reads a number that it was given."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_qualname == "Guardian.log":
            return True
        frame = frame.f_back
    return False


def _ledger_read(frame: FrameType) -> FrameType | None:
    """The frame of Ledger.read around this one, if the ledger reads."""
    around: FrameType | None = frame
    while around is not None and around.f_code.co_filename == _LEDGER:
        if around.f_code.co_name == "read":
            return around
        around = around.f_back
    return None


@contextmanager
def refuse_host_reads() -> Iterator[HostReads]:
    """Inside, a host read by gpt_guard or a guard of yours, outside of the ledger, raises HostReadError.

    Reads of the loop and the model are allowed.

    Enter it inside of `Guardian(..., reads="per_step")`, which keeps to one read per step on the CPU as well; what
    `.ledger` has grown by after a step is the number of reads in it. `guardian.log` reads because it is asked to.
    """
    reads = HostReads()
    with reads:
        try:
            yield reads
        finally:
            reads.forget()
