"""A progress bar where there is a terminal, a plain line now and then where there is none."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINES = 20


class TrainingProgress(AbstractContextManager["TrainingProgress"]):
    """Shows step, loss, learning rate, gradient norm and tokens per second on stderr.

    Counts from step `start` to `total`, at `tokens` tokens a step. Without a terminal (a log file, a pipe) it prints
    about twenty lines over the run.
    """

    def __init__(self, start: int, total: int, tokens: int) -> None:
        self.start, self.total, self.tokens = start, total, tokens
        self._every = max(1, total // PLAIN_LINES)
        self._next_line = start + self._every
        self._terminal = sys.stderr.isatty()
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[facts]}"),
            expand=True,
            console=Console(stderr=True),
            disable=not self._terminal,
            # A redirected stdout would be written to stderr with the bar; only a terminal may be shared.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("training", total=total, completed=start, facts="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, *, loss: float, lr: float, grad_norm: float) -> None:
        """Take the figures after `step` steps; the rate is the mean since the start, validation included."""
        spent = time.perf_counter() - self._began
        rate = (step - self.start) * self.tokens / spent
        facts = f"loss {loss:.3f}  lr {lr:.1e}  grad norm {grad_norm:.2f}  {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, facts=facts)
        if not self._terminal and (step >= self._next_line or step == self.total):
            self._next_line = step + self._every
            left = spent / (step - self.start) * (self.total - step)
            rest = f"  about {left:.0f} s left" if step < self.total else ""
            print(f"step {step:>5}/{self.total}  {facts}{rest}", file=sys.stderr, flush=True)
