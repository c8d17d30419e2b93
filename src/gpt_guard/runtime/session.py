"""Session: one active stretch of a Guardian, from entering to leaving.

Everything attached is registered on one ExitStack at the moment it is attached, so that a failed entry, an exception
in the loop and a normal exit all take the same way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite.microscope import Microscope
from gpt_guard.errors import GuardError
from gpt_guard.hooks import scaler as scaling
from gpt_guard.hooks.backward import BACKWARD
from gpt_guard.hooks.forward import ForwardTap
from gpt_guard.hooks.inspection import Inspection
from gpt_guard.hooks.optimizer import StepHooks
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding
from gpt_guard.replaying.service import Replayer
from gpt_guard.runtime.dispatch import Desk
from gpt_guard.runtime.guard_runner import Roster
from gpt_guard.runtime.loop import Loop
from gpt_guard.runtime.progress import Progress


class Session:
    """Attaches hooks, patches and guards, and detaches them; `close` may run twice."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        guards: Sequence[Guard],
        desk: Desk,
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
        self._desk = desk
        self._guards = tuple(guards)
        self._progress = progress
        with ExitStack() as undo:
            tap = ForwardTap(model, immediate=immediate)
            undo.callback(tap.close)
            watch = Watch(
                model,
                optimizers,
                immediate=immediate,
                tap=tap,
                submit=self._submit,
                inspection=Inspection(tap, steps=inspect_steps, every=inspect_every),
                scheduler=scheduler,
                run_dir=run_dir,
            )
            watch.step = progress.step
            watch.logged, watch.times_logged = progress.metrics, progress.times_logged
            self.watch = watch
            if replayer is not None:
                undo.callback(replayer.close)
                replayer.open(watch, lambda: progress.latest)
            self.roster = Roster(guards, self._submit)
            tap.listen = watch.inspection.run = self.roster.listen
            self.loop = Loop(watch, self.roster, desk, progress)
            self._attach(undo, guards, scaler)
            # Only now, with everything in place, does the way out belong to `close`.
            self._undo = undo.pop_all()

    def _attach(self, undo: ExitStack, guards: Sequence[Guard], scaler: Any) -> None:
        watch, loop = self.watch, self.loop
        undo.callback(loop.close)
        undo.callback(BACKWARD.remove, loop)
        BACKWARD.add(loop)
        for patch in scaling.patches(scaler):
            undo.callback(patch.remove, loop.scaler)
            patch.add(loop.scaler)
        undo.callback(watch.modes.close)
        watch.modes.open()
        undo.callback(StepHooks(watch.optimizers, loop).close)
        watch.tap.open(loop.forwards)
        for guard in guards:
            undo.callback(self.roster.detach, guard)
            self.roster.attach(guard, watch)
        watch.tap.shield(self.roster.listen)
        watch.tap.finish_setup()
        undo.callback(watch.inspection.close)
        # An inspected step is never a light one, whoever asked for it.
        watch.inspection.on_begin(watch.pace.doubt)
        watch.inspection.on_end(self._note_inspection)
        watch.inspection.rouse(self.roster.wake, self.roster.rest)
        watch.inspection.open(watch.step, optimizers=len(watch.optimizers))

    def _submit(self, finding: Finding) -> None:
        """A finding, after those of earlier steps; whatever it is, the next steps are measured in full."""
        self.watch.settle()
        self.watch.pace.doubt()
        self._desk.submit(finding)

    def settle(self) -> None:
        """Have the steps judged that wait for it: somebody wants to know."""
        self.loop.settle()

    def blind_spots(self) -> list[str]:
        """What cannot be seen in this stretch; empty means that everything asked for is watched."""
        return self.loop.unseen.blind_spots() + self.roster.blind_spots()

    def _note_inspection(self) -> None:
        self._progress.inspected = self.watch.inspection.facts()

    def inspect(self, steps: int) -> Microscope:
        """Inspect the next steps, with a microscope in place as long as they last unless there is one anyway."""
        watch, roster = self.watch, self.roster
        watch.inspection.restart(steps)
        watch.pace.doubt()
        found = next((guard for guard in self._guards if isinstance(guard, Microscope)), None)
        scope = Microscope() if found is None else found
        if found is None and watch.inspection.active:
            roster.add(scope, watch)
            watch.inspection.on_end(partial(roster.remove, scope))
        return scope

    def finish(self) -> None:
        """Complete what still waits, let the guards speak at the end, and say what was never seen."""
        self._note_inspection()
        self.loop.finish()
        # A run that is cut short has not had its chance to be seen.
        if not self._desk.quiet:
            self.loop.unseen.finish()

    def leave(self, unseen: list[str]) -> None:
        """Finish and close, and list in `unseen` what was not watched; raises a finding that halts at the end."""
        try:
            self.finish()
        except GuardError as halt:
            # Said and recorded by now; the user's own exception goes first.
            if not self._desk.quiet:
                raise halt.with_traceback(None) from None
        finally:
            try:
                unseen[:] = self.blind_spots()
            finally:
                self.close()

    def close(self) -> None:
        """Detach everything."""
        self._undo.close()
