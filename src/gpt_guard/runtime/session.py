"""Session: one active stretch of a Guardian, from entering to leaving.

It owns every change to torch. The undo of each is registered before the change is made, and may run twice, so that a
failed entry, a Ctrl-C at any line, an exception in the loop and a normal exit all take the same way out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite.microscope import Microscope
from gpt_guard.errors import GuardError
from gpt_guard.hooks.backward import BACKWARD
from gpt_guard.hooks.inspection import Inspection
from gpt_guard.hooks.module_hooks import ModuleHooks
from gpt_guard.hooks.optimizer import StepHooks
from gpt_guard.hooks.scaler import patches
from gpt_guard.hooks.watch import Watch
from gpt_guard.replaying.service import Replayer
from gpt_guard.runtime.dispatch import Dispatch
from gpt_guard.runtime.guard_runner import GuardRunner
from gpt_guard.runtime.loop import Loop
from gpt_guard.runtime.progress import Progress


class Session:
    """Attaches hooks, patches and guards with `open`, and detaches them with `close`, which may run twice."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        guards: Sequence[Guard],
        dispatch: Dispatch,
        progress: Progress,
        *,
        immediate: bool,
        inspect_steps: int = 0,
        inspect_every: int = 0,
        scheduler: Any = None,
        scaler: Any = None,
        run_dir: Path | None = None,
        replayer: Replayer | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._guards = tuple(guards)
        self._progress = progress
        self._replayer = replayer
        self._undo: list[Callable[[], Any]] = []
        tap = ModuleHooks(model, immediate=immediate)
        self.watch = watch = Watch(
            model,
            optimizers,
            immediate=immediate,
            tap=tap,
            submit=dispatch.submit,
            inspection=Inspection(tap, steps=inspect_steps, every=inspect_every),
            scheduler=scheduler,
            run_dir=run_dir,
        )
        watch.step = progress.step
        watch.logged, watch.times_logged = progress.metrics, progress.times_logged
        self.guards = GuardRunner(guards, dispatch.submit)
        self.loop = Loop(watch, self.guards, dispatch, progress)
        self._patches = patches(scaler)
        self._began = time.perf_counter()

    def open(self) -> None:
        """Begin to watch; on any failure everything is as it was."""
        with _own_grad_mode():
            try:
                self._attach()
            except BaseException:
                self.close()
                raise

    def _attach(self) -> None:
        watch, loop, undo = self.watch, self.loop, self._undo.append
        self._began = time.perf_counter()
        self._progress.costs.append((0.0, 0.0))
        undo(watch.tap.close)
        if self._replayer is not None:
            undo(self._replayer.close)
            self._replayer.open(watch, lambda: self._progress.latest)
        watch.tap.listen = watch.inspection.run = self.guards.listen
        undo(partial(BACKWARD.remove, loop))
        BACKWARD.add(loop)
        for patch in self._patches:
            undo(partial(patch.remove, loop))
            patch.add(loop)
        undo(watch.modes.close)
        watch.modes.open()
        steps = StepHooks(watch.optimizers)
        undo(steps.close)
        steps.open(loop)
        watch.tap.open(loop)
        for guard in self._guards:
            undo(partial(self.guards.detach, guard))
            self.guards.attach(guard, watch)
        watch.tap.finish_setup()
        undo(watch.inspection.close)
        watch.inspection.on_end(self._note_inspection)
        watch.inspection.rouse(self.guards.wake, self.guards.rest)
        watch.inspection.open(watch.step, optimizers=len(watch.optimizers))

    def blind_spots(self) -> list[str]:
        """What cannot be seen in this stretch; empty means that everything asked for is watched."""
        return self.loop.blind_spots.blind_spots() + self.guards.blind_spots()

    def note_cost(self) -> None:
        """Note what watching has taken of this stretch so far: what runs at its moments and in its hooks."""
        watch = self.watch
        spent = self.loop.spent + watch.tap.spent + watch.inspection.listened
        self._progress.costs[-1:] = [(spent, time.perf_counter() - self._began)]

    def _note_inspection(self) -> None:
        self._progress.inspected = self.watch.inspection.facts()

    def inspect(self, steps: int) -> Microscope:
        """Inspect the next steps, with a microscope in place as long as they last unless there is one anyway."""
        watch, guards = self.watch, self.guards
        watch.inspection.restart(steps)
        found = next((guard for guard in self._guards if isinstance(guard, Microscope)), None)
        scope = Microscope() if found is None else found
        if found is None and watch.inspection.active:
            guards.add(scope, watch)
            watch.inspection.on_end(partial(guards.remove, scope))
        return scope

    def finish(self) -> None:
        """Complete what still waits, let the guards speak at the end, and say what was never seen."""
        self._note_inspection()
        self.note_cost()
        self.loop.finish()
        # A run that is cut short has not had its chance to be seen.
        if not self._dispatch.quiet:
            self.loop.blind_spots.finish()

    def leave(self, unseen: list[str]) -> None:
        """Finish and close, and list in `unseen` what was not watched; raises a finding that halts at the end."""
        with _own_grad_mode():
            try:
                self.finish()
            except GuardError as halt:
                # Said and recorded by now; the user's own exception goes first.
                if not self._dispatch.quiet:
                    raise halt.with_traceback(None) from None
            finally:
                try:
                    unseen[:] = self.blind_spots()
                finally:
                    self.close()

    def close(self) -> None:
        """Detach everything, the newest first; may run twice, and goes on after a Ctrl-C in the middle of it."""
        try:
            self._detach()
        except BaseException:
            self._detach()
            raise

    def _detach(self) -> None:
        with ExitStack() as undo:
            for each in self._undo:
                undo.callback(each)
        self._undo.clear()


@contextmanager
def _own_grad_mode() -> Iterator[None]:
    """Afterwards gradients are recorded as before, also where a Ctrl-C came between switching that off and on again."""
    enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)
