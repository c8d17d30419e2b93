"""Calls of the model itself: training or evaluation, how much data, and whether a light step may stay one."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from gpt_guard.hooks.watch import Watch
from gpt_guard.runtime.backlog import Backlog
from gpt_guard.runtime.guard_runner import Roster
from gpt_guard.runtime.observing import BatchForm
from gpt_guard.runtime.progress import Progress
from gpt_guard.runtime.stepping import Steps


class Forwards:
    """Listens to the model's forwards; `threads` are those in which it was called."""

    def __init__(
        self,
        watch: Watch,
        roster: Roster,
        progress: Progress,
        steps: Steps,
        backlog: Backlog,
        look_inside: Callable[[], None],
    ) -> None:
        self.threads: set[int] = set()
        self._watch = watch
        self._pace = watch.pace
        self._roster = roster
        self._progress = progress
        self._steps = steps
        self._backlog = backlog
        self._look_inside = look_inside
        self._modes = -1
        self._form = BatchForm()

    def forward_begins(self) -> None:
        """Note whether this is training or evaluation, and how much data it takes."""
        watch = self._watch
        self.threads.add(get_ident())
        watch.evaluation = watch.evaluating or not torch.is_grad_enabled()
        if watch.evaluation:
            self._unlike()
        else:
            watch.forwards += 1
            self._take_batch()
        if self._pace.full:
            self._look_inside()
            watch.tap.as_ever() if watch.evaluation else watch.tap.learn()
        elif len(self.threads) == 1:
            watch.tap.spare()
        else:
            watch.tap.as_ever()
        if watch.inspection.active or watch.evaluation:
            watch.inspection.forward_begins(evaluation=watch.evaluation)
        self._roster.listen_all(watch.forward_begins)
        if self._pace.full:
            self._roster.listen_all(watch.full_forwards)

    def _take_batch(self) -> None:
        """Count what a training forward takes. One unlike those before it is looked at in full."""
        watch, progress = self._watch, self._progress
        if not self._pace.full and watch.forwards == 1 and watch.modes.changes == self._modes:
            found = self._form.amount(watch.tap.inputs)
            if found is not None:
                progress.samples += found[0]
                progress.tokens += found[1]
                return
        self._unlike()
        self._modes = watch.modes.changes
        samples, tokens = self._form.learn(watch.tap.inputs)
        progress.samples += samples
        progress.tokens += tokens

    def passed_by(self) -> None:
        """A backward begins without a call of the model itself: modes count also where only parts are called."""
        self._look_inside()
        if self._watch.modes.changes != self._modes:
            self._unlike()
            self._modes = self._watch.modes.changes

    def _unlike(self) -> None:
        """This step is to be measured in full; what waits is judged before anybody looks at it."""
        if not self._pace.full:
            self._backlog.settle()
            self._pace.doubt(1)

    def forward_ended(self, output: Any) -> None:
        """An evaluation forward is read when it ends, since no step will come to read it."""
        watch = self._watch
        self._roster.listen_all(watch.forward_ended, output)
        if watch.evaluation:
            watch.tap.inputs = None
            watch.inspection.evaluation_ended()
            if not watch.immediate:
                self._steps.judge_early(self._steps.early(), evaluation=True)
