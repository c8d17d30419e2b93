"""Exact checksums of tensors, computed where the tensor is: equal bits, equal number."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """An integer scalar on the tensor's device that is equal for equal bits, and feels the order of elements.

    A sum of bit patterns, each multiplied by a number of its own, wraps around without rounding: the order in which a
    device adds does not change it. Stays on the device; a change detector, no protection against intent.
    """
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.contiguous().flatten()
    bits = (flat.view(torch.uint8) if flat.dtype is torch.bool else flat.view(_BITS[flat.element_size()])).long()
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    # An odd multiplier keeps every bit; without it, swapped elements of one difference could cancel.
    return (bits * (place * 0x9E3779B1 | 1)).sum()
