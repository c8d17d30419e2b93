"""Which modules were called, and with or without a graph: tells an unused layer from a cut graph in the first steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from gpt_guard.hooks.autograd_graph.nodes import uses_any
from gpt_guard.hooks.copies import HookSet, Uncopied
from gpt_guard.hooks.frames import runs_in
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch


class ModuleCalls:
    """Paths of the modules that were called with gradients enabled, and without, in order of their first call.

    `order` holds both. Recomputation by activation checkpointing counts: with the reentrant kind, it is the only call
    that builds a graph.
    """

    def __init__(self) -> None:
        self.order: dict[str, None] = {}
        self.recorded: dict[str, None] = {}
        self.unrecorded: dict[str, None] = {}
        self._hooks = HookSet()

    def listen(self, modules: Iterable[tuple[str, nn.Module]]) -> Self:
        """Note the calls of these modules, each with its path, until `close`."""
        for path, module in modules:
            self._hooks.before_forward(module, _CallHook(self, path, module))
        return self

    def close(self) -> None:
        """Take the hooks away; what was noted stays. May run twice."""
        self._hooks.close()

    def merge(self, other: ModuleCalls) -> None:
        """Add what another pass called."""
        self.order |= other.order
        self.recorded |= other.recorded
        self.unrecorded |= other.unrecorded

    def note(self, path: str, args: Any) -> None:
        """A module is called."""
        self.order.setdefault(path)
        (self.recorded if torch.is_grad_enabled() else self.unrecorded).setdefault(path)


class CallLog(ModuleCalls):
    """Pre-forward hooks on the modules that hold trainable parameters of their own, for a few steps only.

    `reentrant` holds the paths that a reentrant checkpoint ran, `reach` all paths whose calls can be seen: none inside
    a compiled module.

    Of a ModuleList some of whose members are never called, `chained` tells whether the others run one after another.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.reentrant: set[str] = set()
        self.reach = frozenset(watch.tap.names)
        self._watch = watch
        self._forwards = 0
        self._counts: dict[str, list[int]] = {}
        self._pairs: dict[str, str] = {}
        self._chains: set[str] = set()
        self._stale = False

    def begin_anew(self) -> None:
        """Forget all calls, once the next forward begins."""
        self._stale = True

    def open(self) -> None:
        """Begin to note; whoever has made this holds it by then, and can close it wherever it is interrupted."""
        watch = self._watch
        watch.forward_begins.append(self._forward_begins)
        self.listen(
            (path, module)
            for path, module in zip(watch.tap.names, watch.tap.modules, strict=True)
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        )

    def close(self) -> None:
        super().close()
        if self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)

    def ran(self, path: str) -> bool:
        """Whether the module at this path, or one inside it, was called with a graph."""
        return within(path, self.recorded)

    def chained(self, container: str, *, least: int) -> bool:
        """Whether a list of layers runs as a chain that leaves a member out: no router, no stochastic depth.

        That is: the same members were called in each of at least `least` forwards, and the last of them works on what
        the one before it computed. Experts and heads stand side by side, and a choice that varies calls others.
        """
        called = [path for path in self._members(container) if self.ran(path)]
        return (
            container in self._chains
            and self._forwards >= least
            and all(self._calls_of(path) == self._forwards for path in called)
        )

    def _members(self, container: str) -> list[str]:
        prefix = f"{container}." if container else ""
        return [prefix + name for name, _ in self._watch.model.get_submodule(container).named_children()]

    def _calls_of(self, path: str) -> int:
        """In how many forwards the module, or one inside it, was called."""
        inside = path + "."
        counts = (count for called, (_, count) in self._counts.items() if called == path or called.startswith(inside))
        return max(counts, default=0)

    def _forward_begins(self) -> None:
        if self._watch.evaluation:
            return
        if self._stale:
            self._stale = False
            for each in (self.order, self.recorded, self.unrecorded, self.reentrant, self._counts, self._chains):
                each.clear()
            self._forwards = 0
        self._forwards += 1
        if self._forwards != 2:
            return
        # The first forward has shown the order of calls. The lists that it did not use up are looked at in this one.
        for path, module in self._watch.model.named_modules():
            if isinstance(module, nn.ModuleList):
                members = self._members(path)
                called = sorted((each for each in members if self.ran(each)), key=self._place)
                if 2 <= len(called) < len(members):
                    self._pairs[called[-1]] = called[-2]

    def _place(self, member: str) -> int:
        """When the member, or a module inside it, was first called."""
        inside = member + "."
        return next(at for at, called in enumerate(self.recorded) if called == member or called.startswith(inside))

    def note(self, path: str, args: Any) -> None:
        """A module is called by the loop; a call of gpt_guard's own, to look at the model, does not count."""
        if torch.compiler.is_compiling() or self._watch.inspection.functions.muted:
            return
        super().note(path, args)
        if not torch.is_grad_enabled():
            if path not in self.reentrant and runs_in(CheckpointFunction.forward.__code__):
                self.reentrant.add(path)
            return
        entry = self._counts.setdefault(path, [0, 0])
        if entry[0] != self._forwards:
            entry[:] = [self._forwards, entry[1] + 1]
        for member in [each for each in self._pairs if path == each or path.startswith(each + ".")]:
            # Once, at the first call inside of the member: later ones may come round again.
            before = self._watch.model.get_submodule(self._pairs.pop(member))
            weights = list(before.parameters())
            if any(tensor.grad_fn is not None and uses_any(tensor, weights) for _, tensor in walk(args)):
                self._chains.add(member.rpartition(".")[0])


class _CallHook(Uncopied):
    """Acts for its own module only."""

    def __init__(self, calls: ModuleCalls, path: str, module: nn.Module) -> None:
        self._calls = calls
        self._path = path
        self._module = module

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._module:
            self._calls.note(self._path, args)


def within(path: str, called: Iterable[str]) -> bool:
    """Whether the module at this path, or one inside it, is among the called ones."""
    inside = path + "."
    return any(each == path or each.startswith(inside) for each in called)
