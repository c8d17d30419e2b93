"""Tell whether two batches, or two rows of them, hold the same values: by hashes that are made on the device.

A hash of 64 bits: two different rows have the same one with a chance of 2**-64. Nothing here reads the device, and the
random generators of the run are not touched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpt_guard.hooks.tensors import version_of

MIN_ELEMENTS = 16
"""Two batches of fewer ids may be equal by chance where the vocabulary is small."""
LONGEST_ROW = 2**16
"""Of a longer row this many elements, evenly spaced, are looked at; an image of 256 x 256 is looked at whole."""
_ODD = (-7046029254386353131, -4658895280553007687)


def row_hashes(tensor: Tensor) -> Tensor:
    """One hash for each row along dimension 0, `[B]` int64; a tensor without dimensions is one row."""
    rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    rows = rows[:, :: max(1, -(-rows.shape[1] // LONGEST_ROW))]
    mixed = bits_of(rows).flatten(1) * _ODD[0]
    # Without the shift the sum would be linear, and rows that differ by a multiple could meet.
    mixed ^= mixed >> 31
    return (mixed * _weights(mixed.shape[1], str(mixed.device))).sum(1)


def folded(hashes: Tensor) -> Tensor:
    """One hash, of no dimension, of several in their order."""
    return row_hashes(hashes.reshape(1, -1)).squeeze(0)


def constant(tensor: Tensor) -> Tensor:
    """Whether all elements are equal: a bool that stays on the device."""
    flat = tensor.detach().reshape(-1)
    return (flat == flat[:1]).all()


def bits_of(values: Tensor) -> Tensor:
    """The values as int64, one number for each (two for a complex one): equal where the bits are."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return values.long()
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[values.dtype.itemsize]
    return values.contiguous().view(whole).long()


@lru_cache(maxsize=16)
def _weights(count: int, device: str) -> Tensor:
    """Odd numbers, one for each place in a row, so that the order counts."""
    place = torch.arange(1, count + 1, device=device) * _ODD[1]
    place ^= place >> 29
    return (place * _ODD[0]) | 1


class SameMemory:
    """Remembers where a tensor's values lie, without keeping them alive.

    `is_of` is exact: the address of memory that was freed may come back for other values, and counts as another.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._place = _place(tensor)
        # Memory that is another's, as an array's of numpy, has a new storage for each tensor made from it.
        self._borrowed = None if storage.resizable() or not storage.nbytes() else storage.data_ptr()

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the same stretch of the same memory, not written to since as far as torch knows."""
        storage = tensor.untyped_storage()
        # A weak reference keeps the number from being given to another storage.
        same = self._storage.cdata == storage._cdata
        if not same and self._borrowed is not None:
            same = not storage.resizable() and storage.data_ptr() == self._borrowed
        return same and self._place == _place(tensor)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), version_of(tensor)
