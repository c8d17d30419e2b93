"""Guardian: the context manager to put around a training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from gpt_guard.blackbox.black_box import BlackBox
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.callbacks.finite.microscope import Microscope
from gpt_guard.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.modes import evaluation_mode
from gpt_guard.hooks.optimizer import StepsOfAny, innermost
from gpt_guard.records import Finding, Observation, Report
from gpt_guard.replaying.recipe import ReplayOutcome
from gpt_guard.replaying.service import Replayer
from gpt_guard.runtime import arguments
from gpt_guard.runtime.data_stages import Staged
from gpt_guard.runtime.dispatch import Dispatch
from gpt_guard.runtime.error_notes import add_note
from gpt_guard.runtime.policy import Policy, Rules
from gpt_guard.runtime.progress import Progress, stamp_of, state_of, take_back
from gpt_guard.runtime.reporting import header, make_report
from gpt_guard.runtime.session import Session
from gpt_guard.runtime.watched import NEVER_ENTERED, Watched, adopted, warn_if_trained
from gpt_guard.sinks.base import Sink
from gpt_guard.sinks.console import ConsoleSink
from gpt_guard.sinks.files import JsonlSink, with_report

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Guardian(Staged):
    """Watch a training loop from the outside and stop it before a poisoned update.

    Put it round the loop as it is; nothing inside the loop has to change::

        with Guardian(model, optimizer) as guardian:
            for x, y in batches:
                optimizer.zero_grad()
                logits, loss = model(x, y)
                loss.backward()
                optimizer.step()

    Steps are optimizer steps counted from `start_step`; micro-batches are backward calls. Parameters:

    - `optimizer`: the one that steps this model, several of them, or None: one is then adopted at its first step.
    - `guards`: None for the default set, or exactly the guards to use, e.g. `[FiniteGuard(), LRTracker()]`.
    - `scheduler`: one or several learning-rate schedulers, so that LRTracker can tell what they do.
    - `scaler`: only needed for a scaler that is no `torch.amp.GradScaler`; those are noticed by themselves.
    - `run_dir`: folder for the run log `steps.jsonl`, `run_report.json` at the end, and for each failure a bundle of at
      most `bundle_limit_mb` from which `gpt-guard replay` runs the step again; None writes no file.
    - `sinks`: None for the console; otherwise exactly these, besides the run log.
    - `policy`: what to do about which finding, see `gpt_guard.runtime.policy.Policy`; `strict` halts on every error.
    - `tokenizer`, `config`: what this run belongs to, for its fingerprint. `summary`: whether a table ends the run.
    - `reads`: "immediate" tests every output where it is made, "per_step" reads the device once just before each step;
      "auto" is immediate on the CPU, where reading costs nothing, and per step anywhere else.
    - `inspect_steps`, `inspect_every`: the first steps, and one of so many later ones (0: none), see `inspect_now`.
    - `replay`: whether a step with a non-finite value is run again before the finding is told, so that it names the
      operation and the line; a number limits the seconds, True to 20 of the loop's own steps or 5 s.

    Guarded steps are bit-identical to bare ones: weights, losses, optimizer and RNG state. Leaving detaches everything,
    on every way out; the same Guardian can be entered again and goes on counting. Raises GuardUsageError for a model
    or optimizer that cannot be watched, and GuardError subclasses for findings that halt.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        guards: Sequence[Guard] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        run_dir: str | Path | None = None,
        sinks: Sequence[Sink] | None = None,
        policy: Rules | None = None,
        strict: bool = False,
        start_step: int = 0,
        tokenizer: Any = None,
        config: Any = None,
        summary: bool = True,
        reads: arguments.Reads = "auto",
        inspect_steps: int = 3,
        inspect_every: int = 0,
        replay: bool | float = True,
        bundle_limit_mb: float = 2048,
    ) -> None:
        self._watched = Watched(model, optimizer, scheduler, scaler)
        self._reads = arguments.checked_reads(reads)
        self._inspect = arguments.checked_inspect(inspect_steps, inspect_every)
        self._run_dir = folder = arguments.checked_folder(run_dir)
        self._belongings = arguments.checked_belongings(tokenizer, config)
        self.guards = arguments.all_guards(default_guards(**self._belongings) if guards is None else guards)
        self._progress = Progress(arguments.checked_start(start_step), self._watched.count)
        outputs: list[Sink] = [ConsoleSink(summary=summary)] if sinks is None else arguments.checked_sinks(sinks)
        self._replayer = again = Replayer(arguments.checked_replay(replay))
        box = BlackBox(folder, self._watched.alive, again.recipe_for, self.report, bundle_limit_mb)
        outputs += [] if folder is None else [*with_report(JsonlSink(folder)), box]
        self._dispatch = Dispatch(Policy(policy, strict=strict), outputs, self._progress, again.enrich, box.note)
        self._session: Session | None = None
        self._adopts = not self._watched.count
        self._any_step = StepsOfAny(_weakly(self._adopt))
        self._dropped: weakref.finalize[Any, Any] | None = None
        self._not_watched = [NEVER_ENTERED]
        self._unentered = warn_if_trained(self, model)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._leave(error)

    def start(self) -> Self:
        """Begin to watch; for a notebook, where a `with` would span cells. Raises as entering would."""
        if self._session is not None:
            raise GuardUsageError("this Guardian is already watching: stop() it first, or leave the `with` around it")
        model, optimizers = self._watched.alive()
        self._unentered.detach()
        self._dispatch.quiet = False
        try:
            self._dispatch.open(header(model, optimizers, self.guards, self.step))
            if self._adopts:
                self._any_step.open()
            self._watch(model, optimizers)
            return self
        except BaseException:
            self._end()
            raise

    def _watch(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Attach everything to these."""
        self._session = Session(
            model,
            optimizers,
            self.guards,
            self._dispatch,
            self._progress,
            immediate=arguments.reads_at_once(self._reads, model),
            **self._inspect,
            scheduler=self._watched.scheduler(),
            scaler=self._watched.scaler(),
            run_dir=self._run_dir,
            replayer=self._replayer,
        )
        # One that is dropped while it watches, as in a notebook, takes itself off.
        rest = self._watched.model, self.guards, self._dispatch, self._progress
        self._dropped = weakref.finalize(self, _take_off, self._session, self._any_step, *rest)
        self._dropped.atexit = False
        self._session.open()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Begin to watch an optimizer that is about to step the model, where none was given."""
        optimizer = innermost(optimizer)
        if self._session is None or not self._watched.adopt(optimizer):
            return
        self._session.close()
        if self._dropped is not None:
            self._dropped.detach()
        model, optimizers = self._watched.alive()
        self._progress.adopt(len(optimizers))
        self._watch(model, optimizers)
        self._dispatch.submit(adopted(optimizer, self.step))

    def stop(self) -> None:
        """Stop watching and detach everything; does nothing if not watching. Raises a finding that halts at the end."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._session is None:
            return
        self._dispatch.quiet = error is not None
        try:
            if error is not None:
                add_note(error, self._session.watch, self._replayer)
            self._session.leave(self._not_watched)
        finally:
            self._end()

    def _end(self) -> None:
        """Detach, and close the sinks; a Guardian that was interrupted in here ends it with the next `stop()`."""
        try:
            self._any_step.close()
            if self._session is not None:
                self._session.close()
            if self._dropped is not None:
                self._dropped.detach()
            self._session = self._dropped = None
        finally:
            self._dispatch.close(self.report())

    @property
    def latest(self) -> Observation | None:
        """The newest observation: loss, lr per group, grad_norm, grad_norm_clipped, ...; None before the first step.

        On an accelerator what is measured after a step (`update_ratio`) is filled in with the next one.
        """
        return self._progress.latest

    @property
    def step(self) -> int:
        """Optimizer steps made so far, `start_step` included."""
        return self._progress.step

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, each cause once."""
        return tuple(self._dispatch.findings)

    def report(self) -> Report:
        """Run facts and findings as of now."""
        if self._session is not None:
            self._session.note_cost()
        unseen = self._session.blind_spots() if self._session is not None else self._not_watched
        unseen = [*unseen, *self._dispatch.blind_spots()]
        return make_report(self._watched.model(), self.guards, self._dispatch, self._progress, unseen)

    def log(self, **metrics: Any) -> None:
        """Note numbers of your own under the newest step; tensors of one element are read, others a GuardUsageError."""
        numbers = arguments.checked_metrics(metrics)
        self._progress.log(numbers)
        self._dispatch.log(max(self._progress.step - 1, 0), numbers)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Evaluate inside, in eval mode and no-grad; each module gets its own mode back. Needs no active Guardian."""
        model, _ = self._watched.alive()
        with evaluation_mode(model, self._session.watch if self._session is not None else None):
            yield model

    def save(self, path: str | Path, **extra: Any) -> Path:
        """Write a checkpoint with all that a resume needs, stamped with what it belongs to; atomic, reads the device.

        Refuses weights that are not finite (CheckpointError GG706); an older file at `path` is then left as it was.
        `extra` entries are stored beside gpt_guard's own, under their names. Loads under plain `torch.load(path)`.
        """
        state = self.state_dict()
        return save_checkpoint(path, extra=extra or None, guard_state=state, step=self.step, **self._parts())

    def load(self, path: str | Path, *, strict: bool = True) -> LoadedCheckpoint:
        """Go on from a checkpoint: weights, optimizer, scheduler, scaler, and the Guardian's own counts and histories.

        Verifies before it changes anything; `gpt_guard.load_checkpoint` says what it raises and what `strict` means.
        """
        parts = self._parts()
        loaded = load_checkpoint(path, parts.pop("model"), strict=strict, **parts)
        if loaded.guard_state:
            self.load_state_dict(loaded.guard_state)
        elif loaded.step is not None:
            self._progress.start_at(loaded.step)
        return loaded

    def _parts(self) -> dict[str, Any]:
        return {**self._watched.parts(), "on_finding": self._dispatch.submit, **stamp_of(self.guards, self._belongings)}

    def inspect_now(self, steps: int = 1) -> Microscope:
        """Look hard at the next `steps` optimizer steps, as at the first ones: they cost more, and change nothing.

        Once such a step is made, `print()` of what is returned shows the outputs of each module as a table.
        Raises GuardUsageError while not watching.
        """
        if self._session is None:
            raise GuardUsageError("nothing to inspect: this Guardian is not watching; enter it, or call start()")
        return self._session.inspect(steps)

    def watch_loss(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Tell the replay of a loss function outside of the model: `f = guardian.watch_loss(f)`, or as a decorator."""
        return self._replayer.watch_loss(function)

    def replay(self) -> ReplayOutcome:
        """Run the newest step's forward again and tell which operation first gave non-finite values, if any did.

        For a notebook or a debugger; print it. Where no step is held any more, what the last replay has shown; raises
        GuardUsageError where there is neither. Reads the device at every operation; leaves everything as it was.
        """
        return self._replayer.now()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on counting and judging: plain numbers, loadable with `weights_only=True`."""
        return state_of(self._progress, self.guards)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, before entering; guards that were not there then start fresh."""
        take_back(state, self._progress, self.guards)
        if self._session is not None:
            self._session.watch.inspection.restart()


def _weakly(method: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """A method that does not keep its Guardian alive."""
    known = weakref.WeakMethod(method)

    def call(optimizer: Optimizer) -> None:
        if (alive := known()) is not None:
            alive(optimizer)

    return call


def _take_off(
    session: Session,
    any_step: StepsOfAny,
    model: Callable[[], nn.Module | None],
    guards: Sequence[Guard],
    dispatch: Dispatch,
    progress: Progress,
) -> None:
    """Detach what a Guardian that is gone has left, and close its sinks with the report of its run."""
    dispatch.quiet = True
    any_step.close()
    unseen: list[str] = []
    session.leave(unseen)
    dispatch.close(make_report(model(), guards, dispatch, progress, unseen))
