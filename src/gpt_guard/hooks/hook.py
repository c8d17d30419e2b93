"""Hooks on modules: the base of those that are told when a module begins or returns, and what they need of the tap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _is_tracing
from torch.compiler import is_compiling

from gpt_guard.hooks.chains import Link, Succession
from gpt_guard.hooks.copies import Uncopied


class _Asked:
    """In the place of `torch.compiler` where that keeps its flag elsewhere."""

    _is_compiling_flag = property(lambda _: is_compiling())


# What `is_compiling` returns: reading it there saves two calls for every module.
compiler: Any = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _Asked()


class Tap(Protocol):
    """What a hook needs of the tap that it belongs to."""

    paused: bool
    order: deque[int]
    entered: dict[int, tuple[int | None, int]]
    untested: dict[int, list[ref[Tensor]]]
    last: Callable[[], Any]
    last_version: int
    sparing: bool
    waiting: Any
    succession: Succession
    learning: bool

    def suspect(
        self, index: int, position: str, tensor: Tensor, *, entering: bool = False, link: Link | None = None
    ) -> None:
        """A tensor failed the cheap test; as an output that has waited for the next module it comes with its link."""

    def cannot_test(self, index: int, why: str) -> None:
        """A tensor could not be tested."""

    def source_of(self, tensor: Tensor) -> int | None:
        """The module with untested outputs that returned this very tensor."""


class Hook(Uncopied):
    """A module hook that acts for its own module only.

    Between two calls of a hook lies the rest of a training step, and nothing of it is left in the processor's caches.
    So each object that a call has to fetch counts more than the work: slots keep a hook in one piece.
    """

    __slots__ = ("_module", "_returned", "index", "tap")

    def __init__(self, tap: Tap, index: int, module: nn.Module) -> None:
        self.tap = tap
        self.index = index
        self._module = module
        self._returned = tap.order.append

    def active(self, module: nn.Module) -> bool:
        """Whether to act: for its own module, not during a backward, not while a compiler or torch.jit.trace traces."""
        return module is self._module and self.listens()

    def listens(self) -> bool:
        """The same for what is told of its own module only."""
        return not (is_compiling() or self.tap.paused or _is_tracing())


class EntryHook(Hook):
    """Told before its module runs: through `module_calls`, or as a pre-hook of torch's with keyword arguments."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A compiler traces through hooks of torch's: this it knows, while a flag of its own would become a guard.
        if module is self._module and not is_compiling():
            self.enter(args, kwargs)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called."""

    def lightly(self) -> Callable[..., None] | None:
        """What is to be called in its place in light steps, or None."""
        return self.enter


class ReturnHook(Hook):
    """Told of what its module returns: through `module_calls`, or as a hook of torch's."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._module and not is_compiling():
            self.leave(args, None, output)

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """The module has returned; `kwargs` is None where they are not known."""

    def lightly(self) -> Callable[..., None] | None:
        """What is to be called in its place in light steps, or None."""
        return self.leave


class EntryNote(EntryHook):
    """Note the version of a module's first input, to know later whether the module's own code has written to it.

    Beside it, how many modules had returned: those after it were called from inside.
    """

    __slots__ = ()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note it."""
        # `listens` written out here too, and `version_of`: two calls less.
        tap = self.tap
        if tap.paused or compiler._is_compiling_flag or _is_tracing():
            return
        try:
            version = args[0]._version if args and type(args[0]) is Tensor else None
        except RuntimeError:
            version = -1
        tap.entered[self.index] = (version, len(tap.order))

    def lightly(self) -> Callable[..., None] | None:
        """The same for a module that has written to its input before; of the others it is not asked."""
        return self.enter if self.index in self.tap.succession.writers else None
