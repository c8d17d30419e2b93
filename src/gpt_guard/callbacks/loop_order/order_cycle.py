"""One optimizer's cycle: the events from the end of its last step up to its next one, and what rules ask about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from gpt_guard.callbacks.loop_order.events import Clip, Event, Kind
from gpt_guard.callbacks.loop_order.order_losses import Term
from gpt_guard.callbacks.loop_order.order_own import Backward, Step
from gpt_guard.records import Finding, Observation, SourceLine

_CLEARS = (Kind.ZERO_GRAD, Kind.CLEARED)


class Verdict(NamedTuple):
    """What a rule saw in one cycle: a finding, and in how many cycles in a row it must be seen to be said.

    `key` tells ways apart in which one rule can speak: only those with the same key count as a row.
    """

    finding: Finding
    in_a_row: int = 2
    key: str = ""


class Cycle:
    """Events in order, the step at the end included; `last` is the step before, if it was seen.

    `backwards` are the places of the backward calls that wrote gradients of this optimizer. `values` resolves the
    numbers that were read from the device; `running` names the rules that spoke of the cycle before.
    """

    def __init__(
        self,
        index: int,
        events: list[Event],
        last: Event | None,
        seen: Observation,
        values: Mapping[str, float],
        running: Collection[str] = (),
    ) -> None:
        self.index = index
        self.events = events
        self.last = last
        self.seen = seen
        self.values = values
        self.running = running
        self.backwards = self.places(Kind.BACKWARD)
        detail = events[-1].detail if events else None
        self.step = detail if isinstance(detail, Step) else Step(by_hand=False, used=False)

    def places(self, *kinds: Kind) -> list[int]:
        """The places of events of these kinds that concern this optimizer."""
        return [at for at, event in enumerate(self.events) if event.kind in kinds and self.index in event.optimizers]

    def line(self, place: int) -> SourceLine | None:
        """The line of the event at this place."""
        return self.events[place].where

    def clips(self) -> list[tuple[int, Clip]]:
        """All clipping calls of the cycle, of whatever parameters, with their places."""
        return [(at, each.detail) for at, each in enumerate(self.events) if each.kind is Kind.CLIP]

    def own(self, place: int) -> bool:
        """Whether the event at this place concerns this optimizer."""
        return self.index in self.events[place].optimizers

    def cleared_between(self, start: int, stop: int) -> list[int]:
        """Places between two others at which this optimizer's gradients were cleared."""
        return [at for at in self.places(*_CLEARS) if start < at < stop]

    def any_between(self, start: int, stop: int, *kinds: Kind) -> bool:
        """Whether an event of one of these kinds, of whatever optimizer, stands between two places."""
        return any(event.kind in kinds for event in self.events[start + 1 : stop])

    def backward(self, place: int) -> Backward:
        """The detail of a backward call."""
        detail: Backward = self.events[place].detail
        return detail

    @property
    def accumulates(self) -> bool:
        """Whether micro-batches are added up: several backward calls from one line, each after a forward of its own."""
        lines = {str(self.line(at)) for at in self.backwards}
        return (
            len(self.backwards) > 1
            and len(lines) == 1
            and None not in {self.line(at) for at in self.backwards}
            and all(self.any_between(one, other, Kind.FORWARD) for one, other in pairwise(self.backwards))
            and not any(self.backward(at).inputs or self.backward(at).shared for at in self.backwards)
        )

    @property
    def touched_by_hand(self) -> bool:
        """Whether gradients were changed before the step by something that was not seen, such as a division by hand."""
        clipped = any(self.own(at) for at, _ in self.clips())
        return self.step.by_hand or (bool(self.seen.clipped) and not clipped)

    def number(self, value: object) -> float | None:
        """A number that is known, or was read from the device for this cycle."""
        found = self.values.get(value) if isinstance(value, str) else value
        return float(found) if isinstance(found, (int, float)) else None

    def scaled(self, term: Term) -> float | None:
        """All factors of a term multiplied; None where one is not known."""
        total = 1.0
        for factor in term.factors:
            value = self.number(factor.value)
            if value is None or value == 0.0:
                return None
            total *= value**factor.power
        return total
