"""Work of our own in the middle of whatever the user's code is doing: neither may change the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes


def transformed() -> bool:
    """Whether this runs inside of a torch.func transform: there a tensor may stand for many, and none has a value."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def neutral() -> Iterator[None]:
    """Inside, tensors are plain ones: no inference mode, no fake tensors, nothing recorded in a graph or by a mode."""
    with _disable_current_modes(), DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield
