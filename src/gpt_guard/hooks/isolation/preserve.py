"""Check without leaving a trace: everything a check may change is put back, on every way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.hooks.isolation.keeping import Keeper
from gpt_guard.hooks.isolation.random_state import random_state, restore_random_state


@contextmanager
def preserved(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    tensors: Iterable[Tensor] = (),
    *,
    weights: bool = True,
) -> Iterator[None]:
    """Restore parameters, buffers, gradients, optimizer state, modes, RNG (torch, Python, numpy if loaded) and tensors.

    Bit-identical afterwards and the same objects, also after an exception or Ctrl-C: parameters keep their storage,
    tied weights stay tied, optimizer state that a check created is gone. Plain attributes of modules (counters, caches,
    hooks) are put back, too. The model itself is used rather than a deep copy, which could not carry hooks, tied
    weights of the optimizer or what a wrapper (DDP, `torch.compile`) holds. Costs one copy of all tensors; with
    `weights=False`, for what runs a model and does not write to its parameters, theirs are not copied. A random
    generator that the user's own data loading holds is theirs: it advances where batches are drawn.
    """
    random = random_state()
    keeper = Keeper(weights=weights)
    for part in (model, optimizer, *tensors):
        if part is not None:
            keeper.keep(part)
    try:
        yield
    finally:
        with torch.no_grad():
            keeper.put_back()
        restore_random_state(random)
