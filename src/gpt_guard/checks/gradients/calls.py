"""Which modules ran in one pass, in order, and whether they ran with a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Calls:
    """Paths of modules with parameters of their own: those called with gradients enabled, and those called without.

    `order` holds both, in order of the first call. Recomputation by activation checkpointing counts, since with the
    reentrant kind it is the only call that builds a graph.
    """

    def __init__(self) -> None:
        self.order: dict[str, None] = {}
        self.recorded: dict[str, None] = {}
        self.unrecorded: dict[str, None] = {}

    def ran(self, path: str) -> bool:
        """Whether the module at this path, or one inside it, was called at all."""
        return any(called == path or called.startswith(f"{path}.") for called in self.order)

    def merge(self, other: Calls) -> None:
        """Add what another pass called."""
        self.order |= other.order
        self.recorded |= other.recorded
        self.unrecorded |= other.unrecorded

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[Calls]:
        """Note the calls of the model's modules; the hooks are gone afterwards, whatever happens."""
        handles = [
            module.register_forward_pre_hook(self._note(path))
            for path, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            self.order.setdefault(path)
            (self.recorded if torch.is_grad_enabled() else self.unrecorded).setdefault(path)

        return hook
