"""Where a reading would stall the device: extremes of each input and output wait, and are read with the step.

Inputs are measured as well as outputs, each tensor once: the first bad one in this order is where the trouble began.
Minimum and maximum come out of one pass, carry NaN, and cannot overflow, so no second look at the tensor is needed.
"""

from __future__ import annotations

import weakref
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gpt_guard.hooks.output_hooks import Hook, Owner, tested, values_of
from gpt_guard.hooks.tensors import version_of, walk

_HALF = (torch.float16, torch.bfloat16)


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

    def measure(self, tap: Owner, index: int, value: Any, *, entering: bool) -> None:
        """Keep the extremes of each tensor in a structure, unless it was the last one measured."""
        for position, tensor in walk(value):
            if tested(tap, tensor) or (values := values_of(tap, index, tensor)) is None:
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
            tap.last = weakref.ref(tensor)

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
                self.tap.extremes.measure(self.tap, self.index, output, entering=False)
            self.tap.extremes.leave(self.index)
            self.tap.spent += perf_counter() - began
