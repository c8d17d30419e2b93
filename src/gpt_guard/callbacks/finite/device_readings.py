"""FiniteGuard where a reading would stall the device: what waits for the one host read, and what it shows then."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.finite.context import Context, Reported
from gpt_guard.callbacks.finite.first_seen import FirstSeen, Shown, first_seen_on_device
from gpt_guard.callbacks.finite.gradient_findings import bad_gradient
from gpt_guard.callbacks.finite.loss_findings import hidden_from, is_loss, loss_outside
from gpt_guard.callbacks.finite.verdict import verdict
from gpt_guard.hooks.output_hooks import ForwardExtremes
from gpt_guard.hooks.tensors import describe, is_bad
from gpt_guard.hooks.watch import Watch
from gpt_guard.hooks.weights import KnownState, StateWatch
from gpt_guard.records import Finding, Moment, Observation


@dataclass(frozen=True)
class _Forward:
    number: int
    measured: ForwardExtremes
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

    what: FirstSeen | float | dict[str, float]
    micro_batch: int
    evaluation: bool = False
    loss: Tensor | None = None


class DeviceReadings:
    """Forwards and backwards in the order in which they happened, until their readings arrive."""

    def __init__(self) -> None:
        self._events: list[_Forward | _Backward] = []
        self._count = 0

    def keep_forward(self, watch: Watch, micro_batch: int, untouched: dict[int, int], *, evaluation: bool) -> None:
        """Put what one forward measured into the ledger."""
        measured = watch.tap.extremes.take(watch.tap)
        if measured is None:
            return
        self._count += 1
        for part, (_, packed) in enumerate(measured.parts):
            watch.ledger.put(f"finite.{self._count}.{part}", packed)
        self._events.append(_Forward(self._count, measured, micro_batch, untouched, evaluation))

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
            last: tuple[object, ...] = ()
            for number, low, high in sorted(_extremes_of(event, readings)):
                place = event.measured.places[number]
                if low == -torch.inf and not is_bad(low, high) and not place.entering:
                    # What the module around hands on is the same mask again.
                    found = (low, high, place.shape, place.dtype)
                    repeated, last = found == last, found
                    if not repeated:
                        yield place.module, Shown.measured(place, low, high), event.micro_batch, event.evaluation

    def troubles(self, watch: Watch, readings: dict[str, Any], known: KnownState) -> Iterator[Trouble]:
        """Everything that is bad, in the order in which it happened; each forward once. Drops what was read.

        A forward whose outputs are all good handles the bad values it was given, and one that returned a bad loss may
        be left out by the loop: such a one counts once the loss or a gradient of the step is bad. `known` tells what
        state was bad from the start.
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
                culprit = _culprit(watch, event, bad[0], extremes, known)
                trouble = Trouble(culprit, event.micro_batch, event.evaluation)
                entering = all(event.measured.places[number].entering for number, _, _ in bad)
                if not entering and (event.evaluation or not _returned_loss(watch, culprit)):
                    yield trouble
                elif not event.evaluation:
                    held.append(trouble)


def _returned_loss(watch: Watch, culprit: FirstSeen) -> bool:
    return culprit.state is None and is_loss(watch, culprit)


def _culprit(
    watch: Watch,
    event: _Forward,
    first: tuple[int, float, float],
    extremes: list[tuple[int, float, float]],
    known: KnownState,
) -> FirstSeen:
    measured, (number, low, high) = event.measured, first
    place = measured.places[number]
    leaf = next(watch.tap.modules[place.module].children(), None) is None
    neg_inf: str | None = None
    for other, lowest, highest in extremes:
        given = measured.places[other]
        # Where it is not listed itself, what a leaf was given is the tensor measured last before its output.
        near = (other == number - 1 and leaf) or (given.entering and given.module == place.module)
        if other < number and near and lowest == -torch.inf and not is_bad(lowest, highest):
            neg_inf = given.position if given.entering else "[0]"
    shown = Shown.measured(place, low, high)
    return first_seen_on_device(watch.tap, measured, number, shown, event.untouched, known, neg_inf)


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
    for part, (numbers, _) in enumerate(event.measured.parts):
        values = readings.get(f"finite.{event.number}.{part}")
        if values is not None:
            count = len(numbers)
            yield from zip(numbers, values[:count], values[count:], strict=True)


def before_now(watch: Watch) -> int:
    """How many backward calls of the step being prepared have come before, where reading is free: by what they left.

    To be asked when something is bad: looks at each parameter.
    """
    fresh = not watch.since_step or all(parameter.grad is None for parameter in watch.tracked.values())
    return 0 if fresh else watch.micro_batch


def here_in(watch: Watch, micro_batch: int, *, evaluation: bool) -> dict[str, Any]:
    """Step and micro-batch of a forward, by the field names of Finding."""
    place = {"step": watch.step, "moment": Moment.FORWARD, "evaluation": evaluation}
    return place if evaluation else {**place, "micro_batch": micro_batch}


def judge_on_device(
    watch: Watch, readings: DeviceReadings, state: StateWatch, context: Context, reported: Reported, seen: Observation
) -> Iterator[Finding]:
    """One bad forward is told once, and nothing that follows from it in the same step."""
    for index, shown, micro_batch, evaluation in readings.masks(watch, seen.readings):
        context.note_mask(watch, index, shown, here_in(watch, micro_batch, evaluation=evaluation))
    for trouble in readings.troubles(watch, seen.readings, state.known):
        if isinstance(trouble.what, FirstSeen):
            reported.step = reported.step or not trouble.evaluation
            here = here_in(watch, trouble.micro_batch, evaluation=trouble.evaluation)
            yield from verdict(watch, state, context, trouble.what, None, here)
        elif not reported.step:
            reported.step = True
            here = {"step": watch.step, "micro_batch": trouble.micro_batch}
            if isinstance(trouble.what, dict):
                yield bad_gradient(watch, trouble.what, trouble.loss, here)
            else:
                here |= {"moment": Moment.BEFORE_BACKWARD}
                masks, diverging = context.mask_names(watch), context.diverging
                hidden = hidden_from(watch, late=True)
                why = hidden.why if hidden else None
                yield loss_outside(watch, trouble.what, None, None, masks, here, diverging=diverging, why=why)
