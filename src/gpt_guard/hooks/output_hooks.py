"""Hooks on modules: what enters and leaves a module is reduced where it is made.

On the CPU a reading is free: an output is tested with one sum, read at once, so that a halt has the user's own forward
in its traceback. Where a reading would stall the device, the extremes of each input and output wait, and are read with
the step: the first bad one in this order is where the trouble began. Minimum and maximum come out of one pass, carry
NaN, and cannot overflow, so no second look at the tensor is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _set_grad_enabled
from torch.compiler import is_compiling

from gpt_guard.hooks.copies import Uncopied
from gpt_guard.hooks.tensors import kind_of, readable, total, version_of, walk, watchable

_FAST_KINDS = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_STRIDED = torch.strided
_sum = torch.sum
_is_grad_enabled = torch.is_grad_enabled


class Owner(Protocol):
    """What a hook needs of the ModuleHooks that it belongs to."""

    paused: bool
    order: deque[int]
    entered: dict[int, tuple[int | None, int]]
    untested: dict[int, list[ref[Tensor]]]
    last: Callable[[], Any]
    last_version: int
    spent: float

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model itself was called."""

    def end(self, args: tuple[Any, ...], output: Any) -> None:
        """The model itself has returned."""

    def suspect(self, index: int, position: str, tensor: Tensor, *, entering: bool = False) -> None:
        """A tensor failed the cheap test."""

    def cannot_test(self, index: int, why: str) -> None:
        """A tensor could not be tested."""

    def source_of(self, tensor: Tensor) -> int | None:
        """The module with untested outputs that returned this very tensor."""


class Hook(Uncopied):
    """A module hook that acts for its own module only: a copy or a replica that took it along is none of its business.

    Between two calls of a hook lies the rest of a training step, and nothing of it is left in the processor's caches.
    So each object that a call has to fetch counts more than the work: slots keep a hook in one piece.
    """

    __slots__ = ("_module", "_returned", "index", "of_torch", "tap")

    def __init__(self, tap: Owner, index: int, module: nn.Module) -> None:
        self.tap = tap
        self.index = index
        self._module = module
        self._returned = tap.order.append
        # Whether its own code is torch's: where that writes to a tensor, the version counter tells.
        self.of_torch = type(module).__module__.startswith("torch.nn.")

    def active(self, module: nn.Module) -> bool:
        """Whether to act: for its own module, not during a backward, not while a compiler or torch.jit.trace traces."""
        # The compiler first: it traces through this, and knows what it is asked; a flag of ours would become a guard.
        return not is_compiling() and module is self._module and not self.tap.paused and not _is_tracing()


class RootBegins(Hook):
    """Tells of a call of the model itself."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active(module):
            self.tap.begin(args, kwargs)


class RootEnded(Hook):
    """Tells that the model has returned."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.active(module):
            self.tap.end(args, output)


class EntryNote(Hook):
    """Note the version of a module's first input, to know later whether the module's own code has written to it.

    Beside it, how many modules had returned: those after it were called from inside.
    """

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # `active` written out here and in `OutputTest`: a call less on nearly every module.
        tap = self.tap
        if is_compiling() or module is not self._module or tap.paused or _is_tracing():
            return
        try:
            version = args[0]._version if args and type(args[0]) is Tensor else None
        except RuntimeError:
            version = -1
        tap.entered[self.index] = (version, len(tap.order))


class InPlaceInput(Hook):
    """Test what an in-place layer is given: afterwards its input is its output, and tells nothing."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        tensor = args[0] if args else None
        if not self.active(module) or not isinstance(tensor, Tensor) or tested(self.tap, tensor):
            return
        number = measure(self.tap, self.index, tensor)
        if number - number != 0.0:
            self.tap.suspect(self.index, "[0]", tensor, entering=True)


class OutputTest(Hook):
    """Test each tensor of an output with one sum.

    Not again what a child has just returned, where the module's own code is torch's: code of the user's may have
    written to it in between, in a way that moves no version counter.
    """

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tap = self.tap
        if is_compiling() or module is not self._module or tap.paused or _is_tracing():
            return
        began = perf_counter()
        self._returned(self.index)
        if type(output) is Tensor:
            if not (self.of_torch and tested(tap, output)):
                number = quick_sum(tap, self.index, output)
                # x - x is 0 for a finite number and NaN otherwise: cheaper than a call of math.isfinite.
                if number - number != 0.0:
                    tap.suspect(self.index, "", output)
        else:
            self._test_all(tap, output)
        tap.spent += perf_counter() - began

    def _test_all(self, tap: Owner, output: Any) -> None:
        for position, tensor in walk(output):
            number = quick_sum(tap, self.index, tensor)
            if number - number != 0.0:
                tap.suspect(self.index, position, tensor)


class ReturnNote(Hook):
    """Remember that an ignored module returned, and what: whoever receives it must not be blamed on its caller."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.active(module):
            self._returned(self.index)
            self.tap.untested[self.index] = [ref(tensor) for _, tensor in walk(output)]


def tested(tap: Owner, tensor: Tensor) -> bool:
    """Whether this very tensor was the last one tested, and nobody has written to it since, as far as torch counts."""
    return tensor is tap.last() and version_of(tensor) == tap.last_version >= 0


def quick_sum(tap: Owner, index: int, tensor: Tensor) -> float:
    """What `measure` gives, by the shortest way for an ordinary tensor."""
    if type(tensor) is not Tensor or tensor.dtype not in _FAST_KINDS or tensor.layout is not _STRIDED:
        return measure(tap, index, tensor)
    try:
        number = sum_without_graph(tensor) if tensor.dim() else tensor.item()
        tap.last_version = tensor._version
    except RuntimeError:
        return measure(tap, index, tensor)
    tap.last = ref(tensor)
    return number


def sum_without_graph(tensor: Tensor) -> float:
    """Sum of an ordinary tensor, read at once. Raises RuntimeError where it has no values, as inside of vmap."""
    # What torch.no_grad() does: making a context, or a detached tensor, takes as long as the sum.
    if not _is_grad_enabled():
        return _sum(tensor).item()
    try:
        _set_grad_enabled(False)
        return _sum(tensor).item()
    finally:
        _set_grad_enabled(True)


def measure(tap: Owner, index: int, tensor: Tensor) -> float:
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


def values_of(tap: Owner, index: int, tensor: Tensor) -> Tensor | None:
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


class TensorPlace(NamedTuple):
    """Where a measured tensor sat: a module by index, entering or leaving it, and the position in the structure.

    `caller` is the module whose code was running around it; `source` the ignored module that returned the tensor.
    """

    module: int
    entering: bool
    position: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    caller: int | None
    source: int | None


class ForwardExtremes(NamedTuple):
    """The places of one forward, which modules returned in it, and the extremes `[2 * n]`.

    `spans` holds for each place the part of `order` that had returned since the module around it began. `parts` holds
    the place numbers and, on the device, their minima followed by their maxima; one part for each device and dtype.
    """

    places: list[TensorPlace]
    spans: list[tuple[int, int]]
    order: list[int]
    parts: list[tuple[list[int], Tensor]]


class Extremes:
    """What has been measured since `take`, and the modules that are running."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self._places: list[TensorPlace] = []
        self._spans: list[tuple[int, int]] = []
        self._began: dict[int, int] = {}
        self._values: list[tuple[Tensor, Tensor]] = []
        self._known: dict[tuple[int, bool, str], TensorPlace] = {}

    def enter(self, index: int, returned: int) -> None:
        """A module begins, `returned` others have ended; one that is listed already was left by an exception."""
        self.leave(index)
        self.running.append(index)
        self._began[index] = returned

    def leave(self, index: int) -> None:
        """A module has returned; what it had called and not seen returning was left by an exception."""
        if index in self.running:
            del self.running[self.running.index(index) :]

    def measure(self, tap: Owner, index: int, value: Any, *, entering: bool, again: bool = False) -> None:
        """Keep the extremes of each tensor in a structure, unless it was the last one measured; `again`: also then."""
        for position, tensor in walk(value):
            if (not again and tested(tap, tensor)) or (values := values_of(tap, index, tensor)) is None:
                continue
            try:
                low, high = torch.aminmax(values)
            except Exception as error:
                tap.cannot_test(index, f"{type(error).__name__} for a {type(tensor).__name__}")
                continue
            self._values.append((low, high))
            place = self._place(tap, index, position, tensor, entering)
            self._places.append(place)
            around = place.caller if entering else index
            self._spans.append((0 if around is None else self._began.get(around, 0), len(tap.order)))
            tap.last_version = version_of(tensor)
            tap.last = ref(tensor)

    def _place(self, tap: Owner, index: int, position: str, tensor: Tensor, entering: bool) -> TensorPlace:
        caller = self.running[-2] if len(self.running) > 1 and entering else None
        source = tap.source_of(tensor) if tap.untested and entering else None
        known = self._known.get((index, entering, position))
        # Forwards are alike: the same places again cost no memory, however many forwards wait.
        if known is not None and known[3:] == (tensor.shape, tensor.dtype, caller, source):
            return known
        place = TensorPlace(index, entering, position, tuple(tensor.shape), tensor.dtype, caller, source)
        self._known[index, entering, position] = place
        return place

    def take(self, tap: Owner) -> ForwardExtremes | None:
        """What was measured, packed into one tensor for each device and dtype; None if nothing was. Reads nothing."""
        if not self._values:
            return None
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, (low, _) in enumerate(self._values):
            kinds.setdefault((low.device, low.dtype), []).append(number)
        parts = []
        for (_, dtype), numbers in kinds.items():
            pairs = [self._values[number] for number in numbers]
            packed = torch.stack([low for low, _ in pairs] + [high for _, high in pairs])
            parts.append((numbers, packed.float() if dtype in _HALF else packed))
        measured = ForwardExtremes(self._places, self._spans, list(tap.order), parts)
        self._places, self._spans, self._values = [], [], []
        return measured

    def clear(self) -> None:
        """Forget everything."""
        self.running.clear()
        self._known.clear()
        self._began.clear()
        self._places, self._spans, self._values = [], [], []


class ExtremesOwner(Owner, Protocol):
    """ModuleHooks, with the extremes that wait."""

    extremes: Extremes


class EntryExtremes(Hook):
    """Measure what a module is called with."""

    __slots__ = ()
    tap: ExtremesOwner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active(module):
            began = perf_counter()
            extremes = self.tap.extremes
            extremes.enter(self.index, len(self.tap.order))
            extremes.measure(self.tap, self.index, args, entering=True)
            if kwargs:
                extremes.measure(self.tap, self.index, kwargs, entering=True)
            self.tap.spent += perf_counter() - began


class ReturnExtremes(Hook):
    """Measure what a module returns; to be called also when it is left by an exception, with None for an output."""

    __slots__ = ()
    tap: ExtremesOwner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.active(module):
            began = perf_counter()
            if output is not None:
                self.tap.order.append(self.index)
                # Code of the user's own may have written to what it returns, in a way that torch does not count.
                self.tap.extremes.measure(self.tap, self.index, output, entering=False, again=not self.of_torch)
            self.tap.extremes.leave(self.index)
            self.tap.spent += perf_counter() - began
