"""The cheap test of a tensor where a reading is free: its sum, read at once."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from gpt_guard.hooks.hook import Tap
from gpt_guard.hooks.tensors import kind_of, readable, total, version_of, watchable

_FAST_KINDS = (torch.float32, torch.float64)
_STRIDED = torch.strided
_sum = torch.sum
_is_grad_enabled = torch.is_grad_enabled


def tested(tap: Tap, tensor: Tensor) -> bool:
    """Whether this very tensor was the last one tested, and nobody has written to it since."""
    return tensor is tap.last() and version_of(tensor) == tap.last_version


def quick_sum(tap: Tap, index: int, tensor: Tensor) -> float:
    """What `measure` gives, by the shortest way for an ordinary tensor."""
    if type(tensor) is not Tensor or tensor.dtype not in _FAST_KINDS or tensor.layout is not _STRIDED:
        return measure(tap, index, tensor)
    try:
        number: float = sum_without_graph(tensor) if tensor.dim() else tensor.item()
        tap.last_version = tensor._version
    except RuntimeError:
        return measure(tap, index, tensor)
    tap.last = ref(tensor)
    return number


def sum_without_graph(tensor: Tensor) -> float:
    """Sum of an ordinary tensor, read at once. Raises RuntimeError where it has no values, as inside of vmap."""
    # What torch.no_grad() does: making a context, or a detached tensor, takes as long as the sum.
    graph = _is_grad_enabled()
    if not graph:
        number: float = _sum(tensor).item()
        return number
    _set_grad_enabled(False)
    try:
        number = _sum(tensor).item()
    finally:
        _set_grad_enabled(True)
    return number


def measure(tap: Tap, index: int, tensor: Tensor) -> float:
    """Sum of a tensor, read at once; 0.0 where there is nothing to test or nothing can be read."""
    values = values_of(tap, index, tensor)
    if values is None:
        return 0.0
    try:
        number: float = total(values).item()
    except Exception as error:
        # vmap, fake tensors, a subclass without a sum: the model works with them, so the run must go on.
        tap.cannot_test(index, f"{type(error).__name__} for a {type(tensor).__name__}")
        return 0.0
    tap.last_version = version_of(tensor)
    tap.last = ref(tensor)
    return number


def values_of(tap: Tap, index: int, tensor: Tensor) -> Tensor | None:
    """What `readable` gives; a tensor of a kind that cannot be tested is named as not watched."""
    if not watchable(tensor):
        tap.cannot_test(index, f"a {kind_of(tensor)} tensor")
        return None
    return readable(tensor)


def is_finite_scalar(loss: Tensor) -> bool:
    """Whether an ordinary scalar is finite, at the price of one read; False for any other tensor."""
    if type(loss) is not Tensor or loss.dim():
        return False
    try:
        value = loss.item()
    except RuntimeError:
        # A tensor of a torch.func transform.
        return False
    return value - value == 0.0
