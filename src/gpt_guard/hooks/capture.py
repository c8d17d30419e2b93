"""Capture: what it takes to run a forward and its backward again, kept by reference while it is free to keep.

Nothing is copied but the generators' states (5 KB on the CPU). A batch is held until the step ends, and the gradients
that reach the model's outputs until they have been judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from gpt_guard.hooks.ambient import Ambient, Surroundings
from gpt_guard.hooks.arrivals import Arrival, Pattern, await_gradients
from gpt_guard.hooks.tensors import version_of, walk

# Calls of one step that are kept where it is judged as a whole; an older one only if it is small.
_MOST_CALLS = 32
_SMALL = 4 * 2**20
_CONTAINERS = (dict, list)
_VERSION = attrgetter("_version")


@dataclass(slots=True)
class LossCall:
    """One call of a loss function that Guardian was told of; `versions` are those of the tensors it was given.

    `forwards` counts the calls of the model before it; `calls_model` tells that it made one itself.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    versions: list[int]
    forwards: int
    calls_model: bool = False
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One call of the model. `micro_batch` counts the backward calls that came before it in the step.

    `alone` tells that it stands for a loss function which calls parts or methods of the model: with that, nothing else
    is known of the forward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    versions: list[int]
    parameters: list[int]
    step: int
    micro_batch: int
    evaluation: bool
    arrivals: list[Arrival] = field(default_factory=list)
    loss_calls: list[LossCall] = field(default_factory=list)
    losses: tuple[Tensor, ...] = ()
    running: bool = True
    alone: bool = False

    def settle(self) -> None:
        """Let go of what the replay of a backward needs."""
        self.losses = ()
        self.loss_calls.clear()
        for arrival in self.arrivals:
            arrival.gradient = None

    def lighten(self) -> None:
        """Let go of what is large: of several calls the newest is the one most likely asked for."""
        self.loss_calls.clear()
        for arrival in self.arrivals:
            if arrival.gradient is not None and arrival.gradient.nbytes > _SMALL:
                arrival.gradient = None


class NoCapture:
    """Stands where nothing is captured: a call of it costs less than asking whether there is one."""

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    def backward_ended(self, micro_batch: int) -> None:
        """Nothing was kept."""

    def judged(self) -> None:
        """Nothing was kept."""

    def step_ended(self) -> None:
        """Nothing was kept."""


class Capture(NoCapture):
    """The calls of the model in the step being prepared, oldest first, and the newest evaluation.

    Where each backward is judged as it ends (`immediate`), calls before it are dropped with the next forward. An
    evaluation's batch is let go with its end there, and with the next forward where it is judged later.
    """

    def __init__(self, model: nn.Module, *, immediate: bool) -> None:
        self._parameters = list(model.parameters())
        self._surroundings = Surroundings(model)
        self._immediate = immediate
        self._micro_batch = 0
        self._judged = False
        self.count = 0
        self._pattern = Pattern()
        self.calls: deque[ForwardCall] = deque(maxlen=_MOST_CALLS)
        self.evaluation: ForwardCall | None = None
        self.now: ForwardCall | None = None

    def forward_begins(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], step: int, *, evaluation: bool) -> None:
        """Keep what the model was called with."""
        args, kwargs = inputs
        # A forward may take labels out of the dict that it is given: what it held is known from here.
        args = tuple([each.copy() if type(each) in _CONTAINERS else each for each in args])
        ambient = self._surroundings.take()
        self.count += 1
        if self.now is not None and self.now.alone:
            self._drop(self.now)
        call = ForwardCall(
            args, kwargs, ambient, versions_of(inputs), self.parameter_versions(), step, self._micro_batch, evaluation
        )
        self.now = call
        self.evaluation = None
        if evaluation:
            self.evaluation = call
            return
        if self.calls:
            self._make_room()
        self.calls.append(call)

    def _make_room(self) -> None:
        if self._immediate and self._judged:
            self.calls.clear()
        elif _size(self.calls[-1]) > _SMALL:
            self.calls.pop()
        self._judged = False

    def forward_ended(self, output: Any) -> None:
        """Wait for the gradients of what the model returned."""
        call = self.now
        if call is not None:
            call.running = False
            if not call.evaluation:
                call.arrivals = await_gradients(output, self._pattern.positions)
            elif self._immediate:
                self.evaluation = None
                self.now = self.calls[-1] if self.calls else None

    def loss_begins(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], step: int = 0
    ) -> LossCall:
        """Keep what a loss function is called with, until the backward has been judged."""
        call = LossCall(function, args, kwargs, self._surroundings.take(), versions_of((args, kwargs)), self.count)
        if not self.count:
            # No forward has been seen so far: this may be all that there is.
            if self.calls:
                self._make_room()
            self.now = ForwardCall(
                (), {}, call.ambient, [], self.parameter_versions(), step, self._micro_batch, False, alone=True
            )
            self.now.loss_calls.append(call)
            call.calls_model = True
            self.calls.append(self.now)
        return call

    def loss_failed(self) -> None:
        """It raised, or a guard has halted in it: its forward did not end, and nothing waits for its gradients."""
        if self.now is not None and self.now.alone and self.now.running:
            self._drop(self.now)

    def _drop(self, call: ForwardCall) -> None:
        if call in self.calls:
            self.calls.remove(call)
        self.now = None

    def loss_ended(self, call: LossCall, result: Any) -> None:
        """Wait for the gradients of what it returned; it belongs to the newest forward, which it may have run."""
        if self.now is not None and self.now.alone:
            self.now.running = False
            call.arrivals = await_gradients(result)
        elif self.now is not None and not self.now.evaluation:
            call.calls_model = self.count > call.forwards
            call.arrivals = await_gradients(result)
            self.now.loss_calls.append(call)

    def newest(self) -> list[ForwardCall]:
        """The calls since the last backward; if there was none since, those that it has gone through."""
        return [call for call in self.calls if call.micro_batch == self.calls[-1].micro_batch]

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Note which losses the gradients will come from."""
        calls = self.newest()
        for call in calls:
            call.losses = losses
        if calls and losses:
            self._pattern.backward_begins(losses, [call.arrivals for call in calls])

    def backward_ended(self, micro_batch: int) -> None:
        """Gradients of ours are in place, and have been judged where that is free."""
        self._micro_batch = micro_batch
        self._judged = True
        if self._immediate:
            self.judged()
            return
        for call in self.calls:
            if call is not self.now:
                call.lighten()

    def judged(self) -> None:
        """The backward has been judged: what only its replay needs is let go."""
        for call in self.calls:
            call.settle()

    def step_ended(self) -> None:
        """The parameters have changed: nothing of this step can be run again."""
        self.calls.clear()
        self.now = None
        self._micro_batch = 0
        self._judged = False

    def close(self) -> None:
        """Let everything go; may run twice."""
        self.step_ended()
        self.evaluation = None
        self._parameters.clear()

    def parameter_versions(self) -> list[int]:
        """How often each parameter was written to: 40 ns for each."""
        try:
            return list(map(_VERSION, self._parameters))
        except RuntimeError:
            # Inference tensors do not count.
            return [version_of(parameter) for parameter in self._parameters]


def versions_of(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[int]:
    """How often each tensor in what a function was called with has been written to."""
    args, kwargs = inputs
    if not kwargs and all(type(each) is Tensor for each in args):
        return [version_of(tensor) for tensor in args]
    return [version_of(tensor) for tensor in _tensors(inputs)]


def _tensors(inputs: Any) -> Iterator[Tensor]:
    for _, tensor in walk(inputs):
        yield tensor


def _size(call: ForwardCall) -> int:
    return sum(tensor.nbytes for tensor in _tensors((call.args, call.kwargs)))
