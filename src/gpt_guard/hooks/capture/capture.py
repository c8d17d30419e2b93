"""Capture: what it takes to run a forward and its backward again, kept by reference while it is free to keep.

Nothing is copied but the generators' states (5 KB on the CPU). A batch is held until the step ends, and the gradients
that reach the model's outputs until they have been judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from gpt_guard.hooks.capture.captured import SMALL, ForwardCall, LossCall, plain_versions, versions_of
from gpt_guard.hooks.capture.execution_context import Ambient, Surroundings
from gpt_guard.hooks.capture.output_gradients import Pattern, await_gradients, numbers_of, returned
from gpt_guard.hooks.modes import ModeLog
from gpt_guard.hooks.pace import Pace
from gpt_guard.hooks.tensors import version_of

# Calls of one step that are kept where it is judged as a whole; an older one only if it is small.
_MOST_CALLS = 32
_CONTAINERS = (dict, list)
_VERSION = attrgetter("_version")


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


class Capture(NoCapture):
    """The calls of the model in the step being prepared, oldest first, and the newest evaluation.

    Where each backward is judged as it ends (`immediate`), calls before it are dropped with the next forward. An
    evaluation's batch is let go with its end there, and with the next forward where it is judged later. With a `log` of
    mode changes and a `pace`, light steps take over what the log shows to be as it was.
    """

    __slots__ = (
        "_immediate", "_judged", "_micro_batch", "_open", "_parameters", "_pattern", "_surroundings", "calls", "count",
        "evaluation", "now",
    )  # fmt: skip

    def __init__(
        self, model: nn.Module, *, immediate: bool, log: ModeLog | None = None, pace: Pace | None = None
    ) -> None:
        self._parameters = list(model.parameters())
        self._surroundings = Surroundings(model, log, pace)
        self._immediate = immediate
        self._micro_batch = 0
        self._judged = self._open = False
        self.count = 0
        self._pattern = Pattern()
        self.calls: deque[ForwardCall] = deque(maxlen=_MOST_CALLS)
        self.evaluation: ForwardCall | None = None
        self.now: ForwardCall | None = None

    def forward_begins(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], step: int, *, evaluation: bool) -> None:
        """Keep what the model was called with."""
        args, kwargs = inputs
        versions = plain_versions(args, kwargs)
        if versions is None:
            versions = versions_of(inputs)
            # A forward may take labels out of the dict that it is given: what it held is known from here.
            args = tuple([each.copy() if type(each) in _CONTAINERS else each for each in args])
        ambient = self._surroundings.take(fresh=evaluation)
        self.count += 1
        if self.now is not None and self.now.alone:
            self._drop(self.now)
        try:
            # As `parameter_versions`: a call less.
            parameters = list(map(_VERSION, self._parameters))
        except RuntimeError:
            parameters = self.parameter_versions()
        self.now = call = ForwardCall(args, kwargs, ambient, versions, parameters, step, self._micro_batch, evaluation)
        self.evaluation = call if evaluation else None
        if not evaluation:
            if self.calls:
                self._make_room()
            self.calls.append(call)

    def _make_room(self) -> None:
        if self._immediate and self._judged:
            self.calls.clear()
        elif self.calls[-1].nbytes > SMALL:
            self.calls.pop()
        self._judged = False

    def forward_ended(self, output: Any) -> None:
        """Wait for the gradients of what the model returned."""
        call = self.now
        if call is not None:
            call.running = False
            if not call.evaluation:
                positions = self._pattern.positions
                # None is for a pattern that is not known yet.
                if positions is None or positions or (numbers := numbers_of(output)) is None:
                    call.arrivals = await_gradients(output, positions)
                else:
                    call.numbers = numbers
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
            self.now = ForwardCall((), {}, call.ambient, [], self.parameter_versions(), step, self._micro_batch, False)
            self.now.alone = True
            self.now.loss_calls = [*self.now.loss_calls, call]
            call.calls_model = True
            self.calls.append(self.now)
            self._open = True
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
            self.now.loss_calls = [*self.now.loss_calls, call]
            self._open = True

    def newest(self) -> list[ForwardCall]:
        """The calls since the last backward; if there was none since, those that it has gone through."""
        return [call for call in self.calls if call.micro_batch == self.calls[-1].micro_batch]

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        """Note which losses the gradients will come from."""
        calls = self.newest() if len(self.calls) > 1 else self.calls
        if not calls:
            return
        self._open = True
        for call in calls:
            call.losses = losses
        if not losses or self._pattern.positions:
            return
        for call in calls:
            if call.numbers is not None and returned(losses, call.numbers):
                # Nothing waits, and nothing has to.
                return
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
        if self._open:
            self._open = False
            for call in self.calls:
                call.losses = ()
                if call.waiting or call.loss_calls:
                    call.settle()

    def step_ended(self) -> None:
        """The parameters have changed: nothing of this step can be run again."""
        self.calls.clear()
        self.now = None
        self._micro_batch = 0
        self._judged = self._open = False

    def revised(self, ambient: Ambient) -> Ambient:
        """The surroundings of a call, with other modes where those that it took over have changed unnoticed."""
        return self._surroundings.revised(ambient)

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
