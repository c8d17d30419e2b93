"""Whether tensors have changed since some step: the proof that nobody trains them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gpt_guard.callbacks.updates.param_sample import local, sample_view

_SAMPLE = 64


class Still:
    """Some tensors and a small copy of each: whether any has changed since `step`."""

    def __init__(self, tensors: Iterable[Tensor], step: int) -> None:
        self.step = step
        self._pairs = [(tensor, self._look(tensor)) for tensor in tensors]
        self._copies = {id(tensor): copy for tensor, copy in self._pairs}

    @staticmethod
    def _look(tensor: Tensor) -> Tensor:
        values = local(tensor)
        return torch.zeros(0) if values is None else sample_view(values, _SAMPLE).clone()

    def unchanged(self) -> bool:
        """True while all of them are as they were. Reads the device: only under suspicion."""
        return all(torch.equal(self._look(tensor), copy) for tensor, copy in self._pairs)

    def same(self) -> Tensor:
        """The same as a boolean scalar that stays on the device."""
        flags = []
        for tensor, copy in self._pairs:
            now = self._look(tensor)
            flags.append((now == copy).all() if now.shape == copy.shape else copy.new_zeros((), dtype=torch.bool))
        return torch.stack([flag.to(flags[0].device) for flag in flags]).all()

    def unchanged_one(self, tensor: Tensor) -> bool:
        """The same for one of them; False for a tensor that is not."""
        copy = self._copies.get(id(tensor))
        return copy is not None and torch.equal(self._look(tensor), copy)
