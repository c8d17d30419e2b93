"""The loop's events as one small stream: what was called, in which order, for which optimizer, from which line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor

from gpt_guard.records import SourceLine

State = tuple[tuple[int, int], ...]
_NONE = (0, -1)
_MOST_EVENTS = 512


class Kind(StrEnum):
    """What a loop does around a step; the value is the name that findings use."""

    ZERO_GRAD = "zero_grad"
    CLEARED = "gradients cleared by hand"
    FORWARD = "forward"
    EVALUATION = "forward without gradients"
    BACKWARD = "backward"
    UNSCALE = "unscale_"
    CLIP = "clip"
    STEP = "step"
    SKIP = "step left out by the scaler"
    OTHER_STEP = "step of another optimizer"
    SCHEDULER = "scheduler.step"
    MODE = "train/eval"


class Event(NamedTuple):
    """One call. `optimizers` are the watched ones whose parameters it concerns; `detail` depends on the kind."""

    kind: Kind
    optimizers: frozenset[int] = frozenset()
    where: SourceLine | None = None
    detail: Any = None


class Clip(NamedTuple):
    """A call of `clip_grad_norm_` or `clip_grad_value_`: how many tensors it was given, how many had a gradient.

    `scaled` where the gradients carried a GradScaler's scale; `used` where a step had used all of them already.
    """

    how: str
    tensors: int
    with_grad: int
    limit: float
    scaled: bool = False
    used: bool = False


class Scheduled(NamedTuple):
    """A call of `scheduler.step()`: its class, and whether its optimizer has made a step yet.

    `foreign` where it drives an optimizer that is not watched but holds parameters of a watched one.
    """

    name: str
    stepped: bool
    foreign: bool = False


class Events:
    """The newest events in order. `count` numbers all that were ever noted, so that a place in the stream is a number.

    Bounded: of a step with more events than are kept, only the newest are there.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[Event] = deque(maxlen=_MOST_EVENTS)

    def note(self, event: Event) -> None:
        """Append an event."""
        self._kept.append(event)
        self.count += 1

    def since(self, place: int) -> list[Event] | None:
        """The events from this place on; None where some of them are no longer kept."""
        missing = self.count - place
        if missing > len(self._kept):
            return None
        return list(self._kept)[len(self._kept) - missing :]

    def clear(self) -> None:
        """Forget all events; places stay valid for what comes."""
        self._kept.clear()


def gradient_state(parameters: Iterable[Tensor]) -> State:
    """Identity and version of each gradient, without a look at a value; version -1 where there is none."""
    grads = [parameter.grad for parameter in parameters]
    return tuple(_NONE if grad is None else (id(grad), grad._version) for grad in grads)


def versions(parameters: Iterable[Tensor]) -> int:
    """A number that grows with every in-place change of these parameters."""
    return sum(parameter._version for parameter in parameters if not parameter.is_inference())


def cleared(before: State, now: State) -> bool:
    """Whether gradients that were there are gone; a `zero_grad(set_to_none=False)` is not seen this way."""
    there = [(old, new) for old, new in zip(before, now, strict=True) if old[1] >= 0]
    return bool(there) and all(new[1] < 0 for _, new in there)
