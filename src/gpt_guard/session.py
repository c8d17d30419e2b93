"""Session: one active stretch of a Guardian, from entering to leaving.

Everything attached is registered on one ExitStack at the moment it is attached, so that a failed entry, an exception
in the loop and a normal exit all take the same way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.desk import Desk
from gpt_guard.hooks import scaler as scaling
from gpt_guard.hooks.backward import BACKWARD
from gpt_guard.hooks.forward import ForwardTap
from gpt_guard.hooks.optimizer import StepHooks
from gpt_guard.hooks.watch import Watch
from gpt_guard.loop import Loop
from gpt_guard.progress import Progress
from gpt_guard.records import Moment, Severity
from gpt_guard.roster import Roster


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
        scheduler: Any = None,
        scaler: Any = None,
        run_dir: Path | None = None,
    ) -> None:
        self._desk = desk
        self._progress = progress
        self._first_step = progress.step
        with ExitStack() as undo:
            tap = ForwardTap(model, immediate=immediate)
            undo.callback(tap.close)
            watch = Watch(
                model,
                optimizers,
                immediate=immediate,
                tap=tap,
                submit=desk.submit,
                scheduler=scheduler,
                run_dir=run_dir,
            )
            watch.step = progress.step
            self.watch = watch
            self.roster = Roster(guards, desk.submit)
            tap.listen = self.roster.listen
            self.loop = Loop(watch, self.roster, desk, progress)
            self._attach(undo, guards, scaler)
            # Only now, with everything in place, does the way out belong to `close`.
            self._undo = undo.pop_all()

    def _attach(self, undo: ExitStack, guards: Sequence[Guard], scaler: Any) -> None:
        watch, loop = self.watch, self.loop
        for patch in (BACKWARD, *scaling.patches(scaler)):
            undo.callback(patch.remove, loop)
            patch.add(loop)
        undo.callback(watch.modes.close)
        watch.modes.open()
        undo.callback(StepHooks(watch.optimizers, loop).close)
        watch.tap.open(loop)
        for guard in guards:
            undo.callback(self.roster.detach, guard)
            self.roster.attach(guard, watch)
        watch.tap.shield(self.roster.listen)
        watch.tap.finish_setup()

    def blind_spots(self) -> list[str]:
        """What cannot be seen in this stretch; empty means that everything asked for is watched."""
        inside = [f"the inside of the compiled {name or 'model'}" for name in self.watch.tap.inside_compiled]
        if self._unseen_forward():
            inside.append("forward passes: the model was never called")
        return inside + self.roster.blind_spots()

    def _unseen_forward(self) -> bool:
        tap, loop = self.watch.tap, self.loop
        # Where no guard watches modules, calls of the model's parts are not seen; their gradients tell of them.
        return tap.calls == 0 and not tap.order and not loop.saw_modules and (tap.watching or not loop.backwards)

    def finish(self) -> None:
        """Complete what still waits, let the guards speak at the end, and say what was never seen."""
        self.loop.finish()
        # A run that is cut short has not had its chance to be seen.
        if not self._desk.quiet:
            self._report_coverage()

    def _report_coverage(self) -> None:
        stepped = self._progress.step - self._first_step + self._progress.skipped
        if self.watch.tap.inside_compiled:
            self._say_compiled()
        elif self._unseen_forward():
            self._say_uncalled(stepped)
        if self.watch.optimizers and not self.loop.attempts:
            seen = f"{self.loop.backwards} backward calls reached the model" if self.loop.backwards else "no backward"
            self._desk.submit(
                finding(
                    "GG903",
                    f"No optimizer step was seen inside the Guardian ({seen}).",
                    likely=["other_optimizer" if self.loop.backwards else "no_backward"],
                    moment=Moment.EXIT,
                )
            )

    def _say_compiled(self) -> None:
        names = [name or "(the model itself)" for name in self.watch.tap.inside_compiled]
        root = not self.watch.tap.modules
        seen = "Neither inputs nor outputs of the model" if root else "Outputs of the compiled part"
        self._desk.submit(
            finding(
                "GG901",
                f"Hooks inside compiled modules do not fire: {', '.join(names)}. {seen} are seen; loss, gradients and "
                f"parameters are watched.",
                severity=Severity.WARNING if root else Severity.INFO,
                moment=Moment.EXIT,
            )
        )

    def _say_uncalled(self, stepped: int) -> None:
        self._desk.submit(
            finding(
                "GG902",
                f"No forward of the model ({type(self.watch.model).__name__}) was seen in {stepped} steps and "
                f"{self.loop.backwards} backward calls: its outputs were not watched.",
                moment=Moment.EXIT,
            )
        )

    def close(self) -> None:
        """Detach everything."""
        self._undo.close()
