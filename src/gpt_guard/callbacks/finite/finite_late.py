"""What FiniteGuard keeps where a reading would stall the device, and what it finds in it once the host has read it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.finite.blame import Blame, Shown, blame_weighed
from gpt_guard.hooks.tensors import describe, is_bad
from gpt_guard.hooks.watch import Watch
from gpt_guard.hooks.weigh import Weighed


@dataclass(frozen=True)
class _Forward:
    number: int
    weighed: Weighed
    micro_batch: int
    untouched: dict[int, int]
    evaluation: bool


@dataclass(frozen=True)
class _Backward:
    number: int
    micro_batch: int
    names: list[str]
    loss: weakref.ref[Tensor] | None = field(default=None)


class Trouble(NamedTuple):
    """A bad forward (who made it), a bad loss (its value) or bad gradients (their norms), with its micro-batch."""

    what: Blame | float | dict[str, float]
    micro_batch: int
    evaluation: bool = False
    loss: Tensor | None = None


class LateReadings:
    """Forwards and backwards in the order in which they happened, until their readings arrive."""

    def __init__(self) -> None:
        self._events: list[_Forward | _Backward] = []
        self._count = 0

    def keep_forward(self, watch: Watch, micro_batch: int, untouched: dict[int, int], *, evaluation: bool) -> None:
        """Put what one forward weighed into the ledger."""
        weighed = watch.tap.scales.take(watch.tap)
        if weighed is None:
            return
        self._count += 1
        for part, (_, packed) in enumerate(weighed.parts):
            watch.ledger.put(f"finite.{self._count}.{part}", packed)
        self._events.append(_Forward(self._count, weighed, micro_batch, untouched, evaluation))

    def keep_backward(self, watch: Watch, micro_batch: int, loss: Tensor | None, *, gradients: bool) -> None:
        """Put the loss of one backward and the norms of its gradients into the ledger."""
        self._count += 1
        names: list[str] = []
        if loss is not None and loss.is_floating_point():
            watch.ledger.put(f"finite.{self._count}.loss", loss.detach() if loss.dim() == 0 else _extremes(loss))
        if gradients and watch.grad_norms is not None:
            names = watch.grad_norms.names
            watch.ledger.put(f"finite.{self._count}.norms", watch.grad_norms.norms)
        self._events.append(_Backward(self._count, micro_batch, names, None if loss is None else weakref.ref(loss)))

    def masks(self, watch: Watch, readings: dict[str, Any]) -> Iterator[tuple[int, Shown, int, bool]]:
        """Outputs whose minimum is -inf and whose maximum is finite; nothing is dropped yet."""
        for event in self._events:
            if not isinstance(event, _Forward):
                continue
            for number, low, high in _extremes_of(event, readings):
                if low == -torch.inf and not is_bad(low, high):
                    place = event.weighed.places[number]
                    if not place.entering:
                        yield place.module, Shown.weighed(place, low, high), event.micro_batch, event.evaluation

    def troubles(
        self, watch: Watch, readings: dict[str, Any], masks: frozenset[int] = frozenset()
    ) -> Iterator[Trouble]:
        """Everything that is bad, in the order in which it happened; each forward once. Drops what was read.

        A forward whose outputs are all good handles the bad values it was given; it counts once the loss or a gradient
        of the step is bad. `masks` are the ids of the state that was -inf from the start.
        """
        events, self._events = self._events, []
        held: list[Trouble] = []
        for event in events:
            if not isinstance(event, _Forward):
                for trouble in _backward_troubles(watch, event, readings):
                    yield from held
                    held.clear()
                    yield trouble
                continue
            extremes = sorted(_extremes_of(event, readings))
            bad = [found for found in extremes if is_bad(found[1], found[2])]
            if bad:
                trouble = Trouble(_culprit(watch, event, bad[0], extremes, masks), event.micro_batch, event.evaluation)
                if any(not event.weighed.places[number].entering for number, _, _ in bad):
                    yield trouble
                elif not event.evaluation:
                    held.append(trouble)


def _culprit(
    watch: Watch,
    event: _Forward,
    first: tuple[int, float, float],
    extremes: list[tuple[int, float, float]],
    masks: frozenset[int],
) -> Blame:
    weighed, (number, low, high) = event.weighed, first
    place = weighed.places[number]
    leaf = next(watch.tap.modules[place.module].children(), None) is None
    neg_inf: str | None = None
    for other, lowest, highest in extremes:
        given = weighed.places[other]
        # Where it is not listed itself, what a leaf was given is the tensor weighed last before its output.
        near = (other == number - 1 and leaf) or (given.entering and given.module == place.module)
        if other < number and near and lowest == -torch.inf and not is_bad(lowest, highest):
            neg_inf = given.position if given.entering else "[0]"
    shown = Shown.weighed(place, low, high)
    return blame_weighed(watch.tap, weighed, number, shown, event.untouched, masks, neg_inf)


def _backward_troubles(watch: Watch, event: _Backward, readings: dict[str, Any]) -> Iterator[Trouble]:
    loss = readings.get(f"finite.{event.number}.loss", 0.0)
    value = loss if isinstance(loss, float) else max(loss, key=lambda number: (number != number, number))
    if value - value != 0.0:
        yield Trouble(value, event.micro_batch)
    norms = readings.get(f"finite.{event.number}.norms", [])
    suspects = {name: norm for name, norm in zip(event.names, norms, strict=True) if norm - norm != 0.0}
    bad = {name: norm for name, norm in suspects.items() if norm != norm or _still_bad(watch.tracked[name].grad)}
    if bad:
        yield Trouble(bad, event.micro_batch, loss=None if event.loss is None else event.loss())


def _still_bad(grad: Tensor | None) -> bool:
    """Whether an infinite norm is more than an overflow of squares: exact, since clipping cures no infinity."""
    return grad is not None and describe(grad) is not None


def _extremes(loss: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(loss.detach()))


def _extremes_of(event: _Forward, readings: dict[str, Any]) -> Iterator[tuple[int, float, float]]:
    for part, (numbers, _) in enumerate(event.weighed.parts):
        values = readings.get(f"finite.{event.number}.{part}")
        if values is not None:
            count = len(numbers)
            yield from zip(numbers, values[:count], values[count:], strict=True)
