"""Findings about the order of calls: the sequence that was seen next to the one that was expected, with lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpt_guard.callbacks.loop_order.events import Event, Kind
from gpt_guard.callbacks.loop_order.order_cycle import Cycle
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment

_MOST = 24
_LONGEST_PERIOD = 6
# Noted for rules, and no part of what a loop is expected to do between two steps.
_ASIDE = (Kind.EVALUATION, Kind.MODE)


def about(code: str, cycle: Cycle, text: str, *, at: int | None = None, **fields: Any) -> Finding:
    """A finding of this code about a cycle; `at` is the place of the call that is out of order."""
    saw, expected = sequence(cycle), expectation(cycle)
    fields.setdefault("cause_id", f"optimizer {cycle.index}")
    evidence = {"saw": saw, "expected": expected} | fields.pop("evidence", {})
    return finding(
        code,
        f"{text} Saw: {saw}. Expected: {expected}.",
        step=cycle.seen.step,
        moment=Moment.BEFORE_STEP,
        where=None if at is None else cycle.line(at),
        evidence=evidence,
        **fields,
    )


def sequence(cycle: Cycle) -> str:
    """The calls of a cycle as they came, repeats folded, the step before it at the front."""
    events = [*([cycle.last] if cycle.last else []), *cycle.events]
    labels = folded([_label(event, cycle) for event in events if event.kind not in _ASIDE])
    if len(labels) > _MOST:
        labels = [*labels[: _MOST // 2], "...", *labels[-_MOST // 2 :]]
    return ", ".join(labels)


def _label(event: Event, cycle: Cycle) -> str:
    name = str(event.kind)
    if event.kind is Kind.CLIP and cycle.index not in event.optimizers:
        name = "clip of other tensors" if event.detail.tensors else "clip of nothing"
    elif event.kind in (Kind.STEP, Kind.SCHEDULER, Kind.ZERO_GRAD, Kind.BACKWARD) and (
        cycle.index not in event.optimizers
    ):
        name += " of another"
    return f"{name} ({short(event)})" if event.where else name


def short(event: Event) -> str:
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


def expectation(cycle: Cycle) -> str:
    """The calls of a healthy step that does what this one does: accumulates, scales, clips, schedules."""
    micro = "forward, backward"
    count = len(cycle.backwards)
    calls = ["zero_grad", f"({micro}) x {count}" if cycle.accumulates else micro]
    kinds = {event.kind for event in cycle.events}
    scaled = "scaler.scale" in cycle.seen.readings
    if (scaled and Kind.CLIP in kinds) or Kind.UNSCALE in kinds:
        calls.append("unscale_")
    if Kind.CLIP in kinds:
        calls.append("clip")
    calls.append("scaler.step" if scaled else "step")
    if Kind.SCHEDULER in kinds:
        calls.append("scheduler.step")
    return ", ".join(calls)
