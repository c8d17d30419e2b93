"""One optimizer's cycle: the events from the end of its last step up to its next one, and a finding about them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from gpt_guard.callbacks.loop_order.loss_addends import Addend
from gpt_guard.callbacks.loop_order.record import Backward, Clip, Kind, LoopEvent, StepTaken
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Observation, SourceLine

_CLEARS = (Kind.ZERO_GRAD, Kind.CLEARED)
_MOST = 24
_LONGEST_PERIOD = 6


class RuleResult(NamedTuple):
    """What a rule saw in one cycle: a finding, and in how many cycles in a row it must be seen to be reported.

    `key` tells ways apart in which one rule can speak: only those with the same key count as a row.
    """

    finding: Finding
    in_a_row: int
    key: str


@dataclass
class Cycle:
    """Events in order, the step at the end included; `last` is the step before, if it was seen.

    `values` resolves the numbers that were read from the device; `running` are the keys under which rules spoke of the
    cycle before; `uneven` is how many times as much an element of one micro-batch may count as one of another.
    """

    index: int
    events: list[LoopEvent]
    last: LoopEvent | None
    seen: Observation
    values: Mapping[str, float]
    running: Collection[str]
    uneven: float

    @cached_property
    def backwards(self) -> list[int]:
        """The places of the backward calls that wrote gradients of this optimizer."""
        return self.places(Kind.BACKWARD)

    @property
    def step(self) -> StepTaken:
        """The detail of the step at the end; one that was left out was not taken."""
        detail = self.events[-1].detail
        return detail if isinstance(detail, StepTaken) else StepTaken(by_hand=False, used=False)

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

    def scaled(self, addend: Addend) -> float | None:
        """All factors of an addend multiplied; None where one is not known."""
        total = 1.0
        for factor in addend.factors:
            value = self.number(factor.value)
            if value is None or value == 0.0:
                return None
            total *= value**factor.power
        return total

    def result(
        self, code: str, text: str, *, at: int, in_a_row: int = 2, key: str = "", evidence: Any = None, **fields: Any
    ) -> RuleResult:
        """A finding of this code; `at` is the place of the call that is out of order. It shows both sequences."""
        saw, expected = self.sequence(), self.expectation()
        fields.setdefault("cause_id", f"optimizer {self.index}")
        found = finding(
            code,
            f"{text} Saw: {saw}. Expected: {expected}.",
            step=self.seen.step,
            moment=Moment.BEFORE_STEP,
            where=self.line(at),
            evidence={"saw": saw, "expected": expected} | (evidence or {}),
            **fields,
        )
        return RuleResult(found, in_a_row, key)

    def sequence(self) -> str:
        """The calls of a cycle as they came, repeats folded, the step before it at the front."""
        events = [*([self.last] if self.last else []), *self.events]
        labels = folded([self._label(event) for event in events])
        if len(labels) > _MOST:
            labels = [*labels[: _MOST // 2], "...", *labels[-_MOST // 2 :]]
        return ", ".join(labels)

    def _label(self, event: LoopEvent) -> str:
        name = str(event.kind)
        if event.kind is Kind.CLIP and self.index not in event.optimizers:
            name = "clip of other tensors" if event.detail.tensors else "clip of nothing"
        elif event.kind in (Kind.STEP, Kind.SCHEDULER, Kind.ZERO_GRAD, Kind.BACKWARD) and (
            self.index not in event.optimizers
        ):
            name += " of another"
        return f"{name} ({_short(event)})" if event.where else name

    def expectation(self) -> str:
        """The calls of a healthy step that does what this one does: accumulates, scales, clips, schedules."""
        micro = "forward, backward"
        count = len(self.backwards)
        calls = ["zero_grad", f"({micro}) x {count}" if self.accumulates else micro]
        kinds = {event.kind for event in self.events}
        scaled = "scaler.scale" in self.seen.readings
        if (scaled and Kind.CLIP in kinds) or Kind.UNSCALE in kinds:
            calls.append("unscale_")
        if Kind.CLIP in kinds:
            calls.append("clip")
        calls.append("scaler.step" if scaled else "step")
        if Kind.SCHEDULER in kinds:
            calls.append("scheduler.step")
        return ", ".join(calls)


def _short(event: LoopEvent) -> str:
    """File name and line number of an event."""
    return "" if event.where is None else f"{os.path.basename(event.where.file)}:{event.where.line}"


def folded(labels: Sequence[str]) -> list[str]:
    """Runs of one and the same group of labels, as one entry with a count."""
    found: list[str] = []
    at = 0
    while at < len(labels):
        period, times = max(
            ((size, _repeats(labels, at, size)) for size in range(1, _LONGEST_PERIOD + 1)),
            key=lambda each: (each[0] * (each[1] - 1), -each[0]),
        )
        group = ", ".join(labels[at : at + period])
        if times > 1:
            found.append(f"({group}) x {times}" if period > 1 else f"{group} x {times}")
            at += period * times
        else:
            found.append(labels[at])
            at += 1
    return found


def _repeats(labels: Sequence[str], at: int, size: int) -> int:
    group, times = labels[at : at + size], 1
    while labels[at + times * size : at + (times + 1) * size] == group:
        times += 1
    return times if len(group) == size else 1
