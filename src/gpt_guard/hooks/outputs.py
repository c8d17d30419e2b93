"""Hooks that test a module's output where it is made: the hot path of watching on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _set_grad_enabled
from torch.compiler import is_compiling

from gpt_guard.hooks.copies import Uncopied
from gpt_guard.hooks.tensors import kind_of, readable, total, version_of, walk, watchable

_FAST_KINDS = (torch.float32, torch.float64)
_FLOAT32 = torch.float32
_STRIDED = torch.strided
_sum = torch.sum
_is_grad_enabled = torch.is_grad_enabled


class _Asked:
    """In the place of `torch.compiler` where that keeps its flag elsewhere."""

    _is_compiling_flag = property(lambda _: is_compiling())


# What `is_compiling` returns: reading it there saves two calls for every module.
_compiler: Any = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _Asked()


class Tap(Protocol):
    """What a hook needs of the tap that it belongs to."""

    paused: bool
    order: deque[int]
    entered: dict[int, tuple[int | None, int]]
    untested: dict[int, list[ref[Tensor]]]
    last: Callable[[], Any]
    last_version: int

    def suspect(self, index: int, position: str, tensor: Tensor, *, entering: bool = False) -> None:
        """A tensor failed the cheap test."""

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


class ReturnHook(Hook):
    """Told of what its module returns: through `module_calls`, or as a hook of torch's."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._module and not is_compiling():
            self.leave(output)

    def leave(self, output: Any) -> None:
        """The module has returned."""


class EntryNote(EntryHook):
    """Note the version of a module's first input, to know later whether the module's own code has written to it.

    Beside it, how many modules had returned: those after it were called from inside.
    """

    __slots__ = ()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note it."""
        # `listens` written out here too, and `version_of`: two calls less.
        tap = self.tap
        if tap.paused or _compiler._is_compiling_flag or _is_tracing():
            return
        try:
            version = args[0]._version if args and type(args[0]) is Tensor else None
        except RuntimeError:
            version = -1
        tap.entered[self.index] = (version, len(tap.order))


class InPlaceInput(EntryHook):
    """Test what an in-place layer is given: afterwards its input is its output, and tells nothing."""

    __slots__ = ()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Test the first argument."""
        tap = self.tap
        tensor = args[0] if args else None
        if not self.listens() or not isinstance(tensor, Tensor) or tested(tap, tensor):
            return
        number = measure(tap, self.index, tensor)
        if number - number != 0.0:
            tap.suspect(self.index, "[0]", tensor, entering=True)


class OutputTest(ReturnHook):
    """Test an output with one sum; what a child has just returned was tested already."""

    __slots__ = ()

    def leave(self, output: Any) -> None:
        """Test each tensor of it."""
        # `listens` written out, as `quick_sum` below: calls less on nearly every module.
        tap = self.tap
        if tap.paused or _compiler._is_compiling_flag or _is_tracing():
            return
        self._returned(self.index)
        if type(output) is Tensor:
            if output is tap.last() and version_of(output) == tap.last_version:
                return
            if output.dtype is _FLOAT32 and output.layout is _STRIDED:
                graph = _is_grad_enabled()
                try:
                    if graph:
                        _set_grad_enabled(False)
                    number = _sum(output).item()
                    tap.last_version = output._version
                    tap.last = ref(output)
                except RuntimeError:
                    number = measure(tap, self.index, output)
                finally:
                    if graph:
                        _set_grad_enabled(True)
            else:
                number = quick_sum(tap, self.index, output)
            # x - x is 0 for a finite number and NaN otherwise: cheaper than a call of math.isfinite.
            if number - number != 0.0:
                tap.suspect(self.index, "", output)
        elif type(output) is tuple:
            # Logits and loss, most often: without the general walk.
            for place, each in enumerate(output):
                if each is not None:
                    self._test_parts(tap, each, f"[{place}]")
        else:
            self._test_parts(tap, output, "")

    def _test_parts(self, tap: Tap, value: Any, position: str) -> None:
        for at, tensor in ((position, value),) if type(value) is Tensor else walk(value, position):
            if not tested(tap, tensor):
                number = quick_sum(tap, self.index, tensor)
                if number - number != 0.0:
                    tap.suspect(self.index, at, tensor)


class ReturnNote(ReturnHook):
    """Remember that an ignored module returned, and what: whoever receives it must not be blamed on its caller."""

    __slots__ = ()

    def leave(self, output: Any) -> None:
        """Remember it."""
        if self.listens():
            self._returned(self.index)
            self.tap.untested[self.index] = [ref(tensor) for _, tensor in walk(output)]


def tested(tap: Tap, tensor: Tensor) -> bool:
    """Whether this very tensor was the last one tested, and nobody has written to it since."""
    return tensor is tap.last() and version_of(tensor) == tap.last_version


def quick_sum(tap: Tap, index: int, tensor: Tensor) -> float:
    """What `measure` gives, by the shortest way for an ordinary tensor."""
    if type(tensor) is not Tensor or tensor.dtype not in _FAST_KINDS or tensor.layout is not _STRIDED:
        return measure(tap, index, tensor)
    # What torch.no_grad() does: making a context, or a detached tensor, takes as long as the sum.
    graph = _is_grad_enabled()
    _set_grad_enabled(False)
    try:
        number: float = tensor.sum().item()
        tap.last_version = tensor._version
    except RuntimeError:
        return measure(tap, index, tensor)
    finally:
        _set_grad_enabled(graph)
    tap.last = ref(tensor)
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
