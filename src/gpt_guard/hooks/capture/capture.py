"""Capture: what it takes to run a forward and its backward again, kept by reference while it is free to keep.

Nothing is copied but the generators' states (5 KB on the CPU). A batch is held until the step ends, and the gradients
that reach the model's outputs until they have been judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from gpt_guard.hooks.capture.execution_context import ContextReader, ExecutionContext
from gpt_guard.hooks.capture.output_gradients import OutputGradient, UsedOutputs, await_gradients
from gpt_guard.hooks.tensors import version_of, walk

# What counts as large: of several calls in a step, only the newest keeps that.
_SMALL = 4 * 2**20
# Calls of one step that are kept where it is judged as a whole; an older one only if it is small.
_MOST_CALLS = 32
_CONTAINERS = (dict, list)
# What most models are called with: then there is nothing to walk through, which takes longer than all the rest.
_PLAIN = frozenset((Tensor, type(None), bool, int, float, str))
_VERSION = attrgetter("_version")


@dataclass(slots=True)
class LossCall:
    """One call of a loss function that Guardian was told of; `versions` are those of the tensors it was given.

    `forwards` counts the calls of the model before it; `calls_model` tells that it made one itself. `outputs` are the
    tensors that it returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: ExecutionContext
    versions: list[int]
    forwards: int
    calls_model: bool = False
    outputs: Sequence[OutputGradient] = ()


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One call of the model; `outputs` are the tensors in what it returned that a gradient can reach.

    `micro_batch` counts the backward calls that came before it in the step. `alone` tells that it stands for a loss
    function which calls parts or methods of the model: with that, nothing else is known of the forward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: ExecutionContext
    versions: list[int]
    parameters: list[int]
    step: int
    micro_batch: int
    evaluation: bool
    running: bool = True
    alone: bool = False
    losses: tuple[Tensor, ...] = ()
    loss_calls: Sequence[LossCall] = ()
    outputs: Sequence[OutputGradient] = ()

    def settle(self) -> None:
        """Let go of what the replay of a backward needs."""
        self.losses = self.loss_calls = ()
        for output in self.outputs:
            output.gradient = None

    @property
    def nbytes(self) -> int:
        """The size of what the model was called with."""
        return sum(tensor.nbytes for _, tensor in walk((self.args, self.kwargs)))

    def lighten(self) -> None:
        """Let go of what is large: of several calls the newest is the one most likely asked for."""
        self.loss_calls = ()
        for output in self.outputs:
            if output.gradient is not None and output.gradient.nbytes > _SMALL:
                output.gradient = None


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """How often each tensor in what a function was called with has been written to."""
    given = (*args, *kwargs.values()) if kwargs else args
    if _PLAIN.issuperset(map(type, given)):
        return _versions([each for each in given if type(each) is Tensor])
    return _versions([tensor for _, tensor in walk((args, kwargs))])


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        # Inference tensors do not count.
        return [version_of(tensor) for tensor in tensors]


class NoCapture:
    """Stands where nothing is captured: a call of it costs less than asking whether there is one."""

    __slots__ = ()

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    def backward_ended(self, micro_batch: int) -> None:
        """Nothing was kept."""

    def judged(self) -> None:
        """Nothing was kept."""

    def step_ended(self) -> None:
        """Nothing was kept."""

    def renew(self, model: nn.Module) -> None:
        """Nothing is kept."""


class Capture(NoCapture):
    """The calls of the model in the step being prepared, oldest first, and the newest evaluation.

    Where each backward is judged as it ends (`immediate`), calls before it are dropped with the next forward. An
    evaluation's batch is let go with its end there, and with the next forward where it is judged later.
    """

    __slots__ = (
        "_context", "_immediate", "_judged", "_micro_batch", "_open", "_parameters", "_used", "calls", "count",
        "evaluation", "now",
    )  # fmt: skip

    def __init__(self, model: nn.Module, *, immediate: bool) -> None:
        self._parameters = list(model.parameters())
        self._context = ContextReader(model)
        self._immediate = immediate
        self._micro_batch = 0
        self._judged = self._open = False
        self.count = 0
        self._used = UsedOutputs()
        self.calls: deque[ForwardCall] = deque(maxlen=_MOST_CALLS)
        self.evaluation: ForwardCall | None = None
        self.now: ForwardCall | None = None

    def forward_begins(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], step: int, *, evaluation: bool) -> None:
        """Keep what the model was called with."""
        args, kwargs = inputs
        versions, context, parameters = versions_of(args, kwargs), self._context.take(), self.parameter_versions()
        # A forward may take labels out of the dict that it is given: what it held is known from here.
        args = tuple([each.copy() if type(each) in _CONTAINERS else each for each in args])
        self.count += 1
        if self.now is not None and self.now.alone:
            self._drop(self.now)
        self.now = call = ForwardCall(args, kwargs, context, versions, parameters, step, self._micro_batch, evaluation)
        self.evaluation = call if evaluation else None
        if not evaluation:
            self._keep(call)

    def _keep(self, call: ForwardCall) -> None:
        if self.calls:
            if self._immediate and self._judged:
                self.calls.clear()
            elif self.calls[-1].nbytes > _SMALL:
                self.calls.pop()
            self._judged = False
        self.calls.append(call)

    def forward_ended(self, output: Any) -> None:
        """Wait for the gradients of what the model returned."""
        call = self.now
        if call is not None:
            call.running = False
            if not call.evaluation:
                call.outputs = await_gradients(output, self._used.positions)
            elif self._immediate:
                self.evaluation = None
                self.now = self.calls[-1] if self.calls else None

    def loss_begins(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], step: int = 0
    ) -> LossCall:
        """Keep what a loss function is called with, until the backward has been judged."""
        call = LossCall(function, args, kwargs, self._context.take(), versions_of(args, kwargs), self.count)
        if not self.count:
            # No forward has been seen so far: this may be all that there is.
            self.now = ForwardCall((), {}, call.context, [], self.parameter_versions(), step, self._micro_batch, False)
            self.now.loss_calls = (call,)
            self.now.alone = call.calls_model = self._open = True
            self._keep(self.now)
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
            call.outputs = await_gradients(result)
        elif self.now is not None and not self.now.evaluation:
            call.calls_model = self.count > call.forwards
            call.outputs = await_gradients(result)
            self.now.loss_calls = [*self.now.loss_calls, call]
            self._open = True

    def newest(self) -> Sequence[ForwardCall]:
        """The calls since the last backward; if there was none since, those that it has gone through."""
        return [call for call in self.calls if call.micro_batch == self.calls[-1].micro_batch]

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Note which losses the gradients will come from."""
        if not self.calls:
            return
        self._open = True
        calls = self.newest()
        for call in calls:
            call.losses = losses
        if losses and not self._used.positions:
            self._used.backward_begins(losses, [call.outputs for call in calls])

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
        if self._open:
            self._open = False
            for call in self.calls:
                call.settle()

    def step_ended(self) -> None:
        """The parameters have changed: nothing of this step can be run again."""
        self.calls.clear()
        self.now = None
        self._micro_batch = 0
        self._judged = self._open = False

    def close(self) -> None:
        """Let everything go; may run twice."""
        self.step_ended()
        self.evaluation = None
        self._parameters.clear()

    def renew(self, model: nn.Module) -> None:
        """Go on with the parameters that the model has now; a call since which none was written to stays such a one."""
        before = self.parameter_versions()
        self._parameters = list(model.parameters())
        now = self.parameter_versions()
        for call in self.calls if self.evaluation is None else (*self.calls, self.evaluation):
            if call.parameters == before:
                call.parameters = now

    def parameter_versions(self) -> list[int]:
        """How often each parameter was written to: 40 ns for each."""
        return _versions(self._parameters)
