"""One buffer for the values of many small tensors, so that one reduction serves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# 1 MB in float32: it stays in the cache, and there the copy costs less than a reduction call for each tensor. Of more
# values, the passes over memory cost more than the calls.
_MOST_VALUES = 2**18
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Scratch:
    """A float32 copy of tensors that are given anew each time, alike in number and shape.

    Only for ordinary dense floating-point tensors on the CPU, of at most 2**18 elements together.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        self._values = torch.empty(sum(sizes))
        parts = self._values.split(sizes) if sizes else ()
        self._parts = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    @staticmethod
    def holds(tensors: Sequence[Tensor]) -> bool:
        """Whether these are few and ordinary enough."""
        return all(map(_ordinary, tensors)) and sum(tensor.numel() for tensor in tensors) <= _MOST_VALUES

    def __len__(self) -> int:
        return len(self._parts)

    def total(self, tensors: list[Tensor]) -> float:
        """Their sum: NaN and infinities always survive in it; finite values may overflow it. Reads.

        Raises RuntimeError for a tensor that has no place in the buffer.
        """
        if not tensors:
            return 0.0
        with torch.no_grad():
            torch._foreach_copy_(self._parts, tensors)
            found: float = self._values.sum().item()
            return found


def _ordinary(tensor: Tensor) -> bool:
    usual = type(tensor) is nn.Parameter or type(tensor) is Tensor
    return usual and tensor.layout is torch.strided and tensor.dtype in _FLOATS and tensor.device.type == "cpu"
