"""Inspection: the first steps, in which guards may look hard; afterwards all that it needed is gone."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gpt_guard.hooks.functions.function_calls import FunctionCalls
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.module_hooks import ModuleHooks

Listener = Callable[[], None]
# A step of more forwards than this on average is none that anybody waits for.
_MOST_FORWARDS = 100
_LINGERS = 2


class Inspection:
    """Which steps are inspected, and what that costs.

    `active` is True in the first `steps` optimizer steps after entry, after `restart()`, and in one step of every
    `every` (0: never again). The first `steps` forwards of an evaluation are looked at too, whenever they come:
    `looking` is True in these as well. `functions` tells of calls while either holds. `spent` are the seconds that
    went into listeners (`listened`) and probes, `probes` the names of those that ran, `steps_seen` the steps that were
    inspected.
    """

    def __init__(self, tap: ModuleHooks, *, steps: int, every: int = 0) -> None:
        self.functions = FunctionCalls()
        self.active = False
        self.looking = False
        self.spent = self.listened = 0.0
        self.steps_seen = 0
        self.probes: dict[str, int] = {}
        self._tap = tap
        self._steps = steps
        self._every = every
        self._step = 0
        self._optimizers = 0
        self._left = 0
        self._since = 0
        self._forwards = 0
        self._evaluations = steps
        self._lingers = 0
        self._wake: Listener = _nothing
        self._rest: Listener = _nothing
        self._begin: list[Listener] = []
        self._end: list[Listener] = []
        # Replaced by a caller that switches off a guard which fails.
        self.run: Callable[..., None] = _call
        _INSPECTIONS.add(self)

    def on_begin(self, listener: Listener) -> None:
        """Call `listener` whenever a stretch of inspected steps begins, the first one included."""
        self._begin.append(listener)

    def on_end(self, listener: Listener) -> None:
        """Call `listener` when a stretch of inspected steps is over; also at exit, if it was cut short."""
        self._end.append(listener)

    def rouse(self, wake: Listener, rest: Listener) -> None:
        """Have `wake` called before there is something to look at, and `rest` two steps after it is over.

        What a guard has seen in the last inspected step it tells in the one after it, or the next.
        """
        self._wake, self._rest = wake, rest

    def open(self, step: int, *, optimizers: int) -> None:
        """Begin with the first stretch, after all guards have said what they want to see; without training, none."""
        self.functions.run = self._timed
        self._step, self._optimizers = step, optimizers
        self.restart()
        if not self.active:
            self._rest()

    def restart(self, steps: int | None = None, *, within_step: bool = False) -> None:
        """Inspect the next steps (as many as at the start where None): after a resume, a change, or on demand.

        A step that has begun already (`within_step`) is looked at too, and does not count.
        """
        count = self._steps if steps is None else steps
        self._evaluations = max(self._evaluations, count)
        if count <= 0 or not self._optimizers:
            return
        self._left, self._since = max(self._left, count + within_step), 0
        self._forwards = _MOST_FORWARDS * self._left
        if not self.active:
            self._stir()
            self.active = self.looking = True
            self.functions.open()
            for listener in self._begin:
                self.run(listener)

    def _stir(self) -> None:
        if not self._lingers:
            self._wake()
        self._lingers = _LINGERS

    def step_ended(self, step: int) -> None:
        """The run has come to `step`: the stretch may be over. Several optimizers that step in turn make one step."""
        if step == self._step:
            return
        self._step = step
        if self.active and self._left <= 0:
            # The others have stepped, and no forward came: of a container only the parts are called.
            self._finish()
            return
        if self.active:
            self.steps_seen += 1
            self._left -= 1
            # Others may step after the first of several: the stretch ends with the next forward.
            if self._left <= 0 and self._optimizers == 1:
                self._finish()
            return
        if self._lingers:
            self._lingers -= 1
            if not self._lingers:
                self._rest()
        if self._every:
            self._since += 1
            if self._since >= self._every:
                self.restart(1)

    def forward_begins(self, *, evaluation: bool) -> None:
        """The first few forwards without gradients are looked at, however late they come.

        Where no step ever comes, forwards end the stretch.
        """
        # An evaluation that was left by an exception has not ended.
        self.evaluation_ended()
        if self.active:
            self._forwards -= 1
            if self._forwards <= 0 or self._left <= 0:
                self._finish()
        elif evaluation and self._evaluations > 0:
            self._evaluations -= 1
            self._stir()
            self.looking = True
            self.functions.open()

    def evaluation_ended(self) -> None:
        """A forward without gradients is over."""
        if self.looking and not self.active:
            self.looking = False
            self.functions.close()

    def _finish(self) -> None:
        if self.active:
            self.active = self.looking = False
            self._left = 0
            self.functions.close()
            for listener in self._end:
                self.run(listener)

    @contextmanager
    def probing(self, name: str) -> Iterator[None]:
        """Run the model inside for a look of gpt_guard's own: unseen by hooks and guards, and everything is put back.

        Buffers, gradients, modes, plain attributes of modules and random generators are as before afterwards; a probe
        must not write to the parameters. Its time is counted, its name listed in the report.
        """
        start = time.perf_counter()
        self.probes[name] = self.probes.get(name, 0) + 1
        # Another Guardian on the same model must not take the forwards of a probe for the loop's.
        seeing = [each for each in _INSPECTIONS if each._sees(self._tap.model)]
        before = [(each, each._tap.paused, each.functions.muted) for each in seeing]
        try:
            for each in seeing:
                each._tap.paused = each.functions.muted = True
            with preserved(self._tap.model, weights=False):
                yield
        finally:
            for each, paused, muted in before:
                each._tap.paused, each.functions.muted = paused, muted
            self.spent += time.perf_counter() - start

    def _sees(self, model: nn.Module) -> bool:
        """Whether a call of this model runs modules that are watched here."""
        return id(model) in self._tap.index or any(id(each) in self._tap.index for each in model.children())

    def facts(self) -> dict[str, Any]:
        """What it has cost, by the field names of Report."""
        seconds = round(self.spent, 4)
        return {"inspected_steps": self.steps_seen, "inspection_seconds": seconds, "probes": dict(self.probes)}

    def close(self) -> None:
        """Take everything away; may run twice."""
        self._finish()
        self.functions.close()
        self.looking = False
        self.functions.clear()
        self._wake = self._rest = _nothing
        self._begin.clear()
        self._end.clear()

    def _timed(self, listener: Callable[..., None], call: object) -> None:
        start = time.perf_counter()
        self.run(listener, call)
        taken = time.perf_counter() - start
        self.spent += taken
        self.listened += taken


# All that exist, so that the probe of one is unseen by the others.
_INSPECTIONS: weakref.WeakSet[Inspection] = weakref.WeakSet()


def _nothing() -> None:
    return None


def _call(listener: Callable[..., None], *args: object) -> None:
    listener(*args)
