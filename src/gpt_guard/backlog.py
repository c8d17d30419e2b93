"""Backlog: light steps that were measured and not yet judged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpt_guard.desk import Desk
from gpt_guard.hooks.neutral import neutral, transformed
from gpt_guard.ledger import Readings
from gpt_guard.observing import complete, observe
from gpt_guard.progress import Progress
from gpt_guard.records import Moment
from gpt_guard.roster import Roster


@dataclass(slots=True)
class Row:
    """A light step as it was measured: `readings` before it, `late` after it; `names` are those of the norms."""

    step: int
    readings: Readings
    names: list[str]
    tokens: int
    samples: int
    step_time: float | None
    late: Readings


class Backlog:
    """Makes the observations of light steps and has them judged, in their order, when somebody wants to know."""

    def __init__(self, roster: Roster, desk: Desk, progress: Progress) -> None:
        self._roster = roster
        self._desk = desk
        self._progress = progress
        self._rows: deque[Row] = deque()
        self._judging = False

    def add(self, row: Row) -> None:
        """Keep a step for later."""
        self._rows.append(row)

    def settle(self) -> None:
        """Judge all that waits; raises what halts. Does nothing while it is at work: a finding asks for it too.

        Nor inside of a transform such as vmap, where no figure can be worked out: what waits then waits for longer.
        """
        if self._judging or not self._rows or transformed():
            return
        self._judging = True
        try:
            with neutral():
                while self._rows:
                    self._judge(self._rows.popleft())
        finally:
            self._judging = False

    def _judge(self, row: Row) -> None:
        seen = observe(
            row.readings,
            row.names,
            None,
            None,
            step=row.step,
            moment=Moment.BEFORE_STEP,
            optimizer=0,
            micro_batches=1,
            tokens=row.tokens or None,
            samples=row.samples or None,
            skipped=False,
        )
        self._progress.latest = seen
        self._roster.judge(seen, late=True)
        seen = complete(seen, row.late, row.step_time)
        self._progress.finish(seen)
        self._desk.observe(seen)
        self._roster.judge(seen, late=True)
