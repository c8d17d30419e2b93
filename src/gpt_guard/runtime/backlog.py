"""Backlog: light steps that were measured and not yet judged."""

from __future__ import annotations

from collections import deque

from gpt_guard.hooks.gradients import GradNorms, HeardNorms
from gpt_guard.hooks.ledger import Readings
from gpt_guard.hooks.neutral import neutral, transformed
from gpt_guard.hooks.pace import Pace
from gpt_guard.records import Moment
from gpt_guard.runtime.dispatch import Desk
from gpt_guard.runtime.guard_runner import Roster
from gpt_guard.runtime.observing import complete, observe
from gpt_guard.runtime.progress import Progress

# Light steps from one full step to the next.
_MOST = Pace.every - 1
# A light step as it was measured: its number, the readings before it, the norms of its gradients, tokens and samples so
# far, its time, and the readings after it. A plain tuple, since nothing is made with fewer lines of Python.
Row = tuple[int, Readings, GradNorms | HeardNorms, int, int, float, Readings]


class Backlog:
    """Makes the observations of light steps and has them judged, in their order, when somebody wants to know."""

    def __init__(self, roster: Roster, desk: Desk, progress: Progress) -> None:
        self._roster = roster
        self._desk = desk
        self._progress = progress
        self._rows: deque[Row] = deque()
        self._judging = self._told = False

    def add(self, row: Row) -> bool:
        """Keep a step for later; True if it should not be much later."""
        self._rows.append(row)
        return len(self._rows) >= _MOST

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
                    self._judge_first()
        finally:
            self._judging = False

    def _judge_first(self) -> None:
        """Judge the oldest; a Ctrl-C before it has been told leaves it where it is, for the end of the run."""
        self._told = False
        try:
            self._judge(self._rows[0])
        except KeyboardInterrupt:
            if self._told:
                self._rows.popleft()
            raise
        except BaseException:
            self._rows.popleft()
            raise
        self._rows.popleft()

    def _judge(self, row: Row) -> None:
        step, readings, norms, tokens, samples, step_time, late = row
        seen = observe(
            readings | {"grad_norms": norms.norms},
            norms.names,
            None,
            None,
            step=step,
            moment=Moment.BEFORE_STEP,
            optimizer=0,
            micro_batches=1,
            tokens=tokens or None,
            samples=samples or None,
            skipped=False,
        )
        self._progress.latest = seen
        self._roster.judge(seen, late=True)
        seen = complete(seen, late, step_time)
        self._progress.finish(seen)
        self._told = True
        self._desk.observe(seen)
        self._roster.judge(seen, late=True)
