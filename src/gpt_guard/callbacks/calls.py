"""Which modules were called, and with or without a graph: tells an unused layer from a cut graph in the first steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from gpt_guard.hooks.watch import Watch


class CallLog:
    """Pre-forward hooks on the modules that hold trainable parameters of their own, for a few steps only.

    `recorded` and `unrecorded` hold the paths of the modules that were called with and without gradients enabled, in
    order of their first call. Recomputation by activation checkpointing counts: with the reentrant kind, it is the
    only call that builds a graph. `reach` holds all paths whose calls can be seen: none inside a compiled module.
    """

    def __init__(self, watch: Watch) -> None:
        self.recorded: dict[str, None] = {}
        self.unrecorded: dict[str, None] = {}
        self.reach = frozenset(watch.tap.names)
        self._handles: list[Any] = []
        for path, module in zip(watch.tap.names, watch.tap.modules, strict=True):
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(_CallHook(self, path, module)))

    def close(self) -> None:
        """Take the hooks away; what was noted stays. May run twice."""
        while self._handles:
            self._handles.pop().remove()

    def ran(self, path: str) -> bool:
        """Whether the module at this path, or one inside it, was called with a graph."""
        inside = path + "."
        return any(called == path or called.startswith(inside) for called in self.recorded)


class _CallHook:
    """Acts for its own module only: a copied model takes along a hook that does nothing."""

    def __init__(self, log: CallLog, path: str, module: nn.Module) -> None:
        self._log = log
        self._path = path
        self._module = module

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if module is self._module and not torch.compiler.is_compiling():
            log = self._log
            (log.recorded if torch.is_grad_enabled() else log.unrecorded).setdefault(self._path)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library, so that a pickle can be read where gpt_guard is not installed: it does nothing.
        return (getattr, (nullcontext, "__exit__"))
