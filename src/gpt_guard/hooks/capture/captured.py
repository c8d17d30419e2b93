"""What is kept of one call of the model, and of a loss function, in the step being prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from gpt_guard.hooks.capture.execution_context import Ambient
from gpt_guard.hooks.capture.output_gradients import Arrival, Numbers, listed
from gpt_guard.hooks.tensors import version_of, walk

# What counts as large: of several calls in a step, only the newest keeps that.
SMALL = 4 * 2**20
# What a model is called with beside tensors, and what holds none.
_PLAIN = (type(None), bool, int, float, str)
_TENSORS = frozenset((Tensor,))
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


class ForwardCall:
    """One call of the model. `micro_batch` counts the backward calls that came before it in the step.

    `numbers` are those of its outputs where nothing waits for their gradients. `alone` tells that it stands for a loss
    function which calls parts or methods of the model: with that, nothing else is known of the forward.
    """

    # What most of them end with, on the class: one is made in every step.
    running = True
    alone = False
    losses: tuple[Tensor, ...] = ()
    loss_calls: Sequence[LossCall] = ()
    numbers: Numbers | None = None
    waiting: Sequence[Arrival] = ()

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ambient: Ambient,
        versions: list[int],
        parameters: list[int],
        step: int,
        micro_batch: int,
        evaluation: bool,
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.ambient = ambient
        self.versions = versions
        self.parameters = parameters
        self.step = step
        self.micro_batch = micro_batch
        self.evaluation = evaluation

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """The outputs that a gradient can reach."""
        if self.numbers is not None:
            self.waiting, self.numbers = listed(self.numbers), None
        return self.waiting

    @arrivals.setter
    def arrivals(self, arrivals: Sequence[Arrival]) -> None:
        self.waiting = arrivals

    def settle(self) -> None:
        """Let go of what the replay of a backward needs."""
        self.losses = ()
        self.loss_calls = ()
        for arrival in self.waiting:
            arrival.gradient = None

    @property
    def nbytes(self) -> int:
        """The size of what the model was called with."""
        return sum(tensor.nbytes for tensor in _tensors((self.args, self.kwargs)))

    def lighten(self) -> None:
        """Let go of what is large: of several calls the newest is the one most likely asked for."""
        self.loss_calls = ()
        for arrival in self.waiting:
            if arrival.gradient is not None and arrival.gradient.nbytes > SMALL:
                arrival.gradient = None


def versions_of(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[int]:
    """How often each tensor in what a function was called with has been written to."""
    return [version_of(tensor) for tensor in _tensors(inputs)]


def plain_versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """The same where all are tensors or plain values; None where there is more to look at."""
    found: list[int] = []
    try:
        if not kwargs and _TENSORS.issuperset(map(type, args)):
            return list(map(_VERSION, args))
        for each in (*args, *kwargs.values()) if kwargs else args:
            if type(each) is Tensor:
                found.append(each._version)
            elif type(each) not in _PLAIN:
                return None
    except RuntimeError:
        # Inference tensors do not count.
        return None
    return found


def _tensors(inputs: Any) -> Iterator[Tensor]:
    for _, tensor in walk(inputs):
        yield tensor
