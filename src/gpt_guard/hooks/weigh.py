"""Where a reading would stall the device: extremes of each input and output wait, and are read with the step.

Inputs are weighed as well as outputs, each tensor once: the first bad one in this order is where the trouble began.
Minimum and maximum come out of one pass, carry NaN, and cannot overflow, so no second look at the tensor is needed.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpt_guard.hooks.hook import EntryHook, ReturnHook, Tap
from gpt_guard.hooks.sums import tested, values_of
from gpt_guard.hooks.tensors import version_of, walk

_HALF = (torch.float16, torch.bfloat16)


class Place(NamedTuple):
    """Where a weighed tensor sat: a module by index, entering or leaving it, and the position in the structure.

    `caller` is the module whose code was running around it; `source` the ignored module that returned the tensor.
    """

    module: int
    entering: bool
    position: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    caller: int | None
    source: int | None


class Weighed(NamedTuple):
    """The places of one forward, which modules returned in it, and the extremes `[2 * n]`.

    `spans` holds for each place the part of `order` that had returned since the module around it began. `parts` holds
    the place numbers and, on the device, their minima followed by their maxima; one part for each device and dtype.
    """

    places: list[Place]
    spans: list[tuple[int, int]]
    order: list[int]
    parts: list[tuple[list[int], Tensor]]


class Scales:
    """What has been weighed since `take`, and the modules that are running."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self._places: list[Place] = []
        self._spans: list[tuple[int, int]] = []
        self._began: dict[int, int] = {}
        self._values: list[tuple[Tensor, Tensor]] = []
        self._known: dict[tuple[int, bool, str], Place] = {}

    def enter(self, index: int, returned: int) -> None:
        """A module begins, `returned` others have ended; one that is listed already was left by an exception."""
        self.leave(index)
        self.running.append(index)
        self._began[index] = returned

    def leave(self, index: int) -> None:
        """A module has returned; what it had called and not seen returning was left by an exception."""
        if index in self.running:
            del self.running[self.running.index(index) :]

    def weigh(self, tap: Tap, index: int, value: Any, *, entering: bool) -> None:
        """Keep the extremes of each tensor in a structure, unless it was the last one weighed."""
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

    def _place(self, tap: Tap, index: int, position: str, tensor: Tensor, entering: bool) -> Place:
        caller = self.running[-2] if len(self.running) > 1 and entering else None
        source = tap.source_of(tensor) if tap.untested and entering else None
        known = self._known.get((index, entering, position))
        # Forwards are alike: the same places again cost no memory, however many forwards wait.
        if known is not None and known[3:] == (tensor.shape, tensor.dtype, caller, source):
            return known
        place = Place(index, entering, position, tuple(tensor.shape), tensor.dtype, caller, source)
        self._known[index, entering, position] = place
        return place

    def take(self, tap: Tap) -> Weighed | None:
        """What was weighed, packed into one tensor for each device and dtype; None if nothing was. Reads nothing."""
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
        weighed = Weighed(self._places, self._spans, list(tap.order), parts)
        self._places, self._spans, self._values = [], [], []
        return weighed

    def clear(self) -> None:
        """Forget everything."""
        self.running.clear()
        self._known.clear()
        self._began.clear()
        self._places, self._spans, self._values = [], [], []


class ScaleTap(Tap, Protocol):
    """A tap with scales."""

    scales: Scales


class WeighInputs(EntryHook):
    """Weigh what a module is called with."""

    tap: ScaleTap

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Weigh all of it."""
        if self.listens():
            scales = self.tap.scales
            scales.enter(self.index, len(self.tap.order))
            scales.weigh(self.tap, self.index, args, entering=True)
            if kwargs:
                scales.weigh(self.tap, self.index, kwargs, entering=True)


class WeighOutputs(ReturnHook):
    """Weigh what a module returns; to be called also when it is left by an exception, with None for an output."""

    tap: ScaleTap

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """Weigh all of it."""
        if self.listens():
            if output is not None:
                self.tap.order.append(self.index)
                self.tap.scales.weigh(self.tap, self.index, output, entering=False)
            self.tap.scales.leave(self.index)
