"""Forwards with gradients on whose graphs die without a backward: an evaluation that forgot to say so."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from gpt_guard.callbacks.modes.sensitive import Sensitive, described
from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity, SourceLine

# Backwards of a loop from which its own number of forwards for one is known.
_KNOWN = 3
# This many more than ever before make one look closer.
_MORE = 2
_NAME = "gpt_guard"


class _Mark:
    """Lives as long as the graph that it is put on."""


class UnusedGraphs:
    """Counts the forwards before each backward, and looks closer where there are more than ever before: `marking`.

    From there on each output's graph is marked, which costs a few microseconds and only then. A graph that is gone
    when the next backward of the model begins was never used: a model that is called many times for one loss keeps
    all of them until then, and so does a loop that keeps its outputs, which is not judged.
    """

    def __init__(self) -> None:
        self.marking = False
        self._forwards = 0
        self._most = 0
        self._backwards = 0
        self._marks: list[weakref.ref[_Mark]] = []
        self._where: SourceLine | None = None
        self._training: list[Sensitive] = []
        self._reported = False

    def forward_begins(self, count: int) -> None:
        """The model is called with gradients enabled, for the `count`-th time since the last backward."""
        self._forwards = count
        self.marking = self._backwards >= _KNOWN and count >= self._most + _MORE

    def forward_ended(self, output: Any, modules: Sequence[Sensitive]) -> None:
        """Mark the graph of an output."""
        node: Any = next((tensor.grad_fn for _, tensor in walk(output) if tensor.grad_fn is not None), None)
        if node is None:
            return
        mark = _Mark()
        node.metadata[_NAME] = mark
        self._marks.append(weakref.ref(mark))
        if self._where is None:
            self._where = user_line()
            self._training = [each for each in modules if each.module.training]

    def judge(self, watch: Watch, modules: int) -> None:
        """Tell of what was marked and is gone by now, once; asked when a backward begins, and at the end."""
        gone = sum(mark() is None for mark in self._marks)
        if not gone:
            self._most = max(self._most, self._forwards)
        elif not self._reported:
            self._reported = True
            watch.submit(self._finding(watch, gone, modules))
        self._backwards += 1
        self._forwards = 0
        self.marking = False
        if self._marks:
            self._marks, self._where, self._training = [], None, []

    def _finding(self, watch: Watch, gone: int, modules: int) -> Finding:
        training = self._training
        paths = [each.path for each in training]
        mode = f"with {len(training)} of {modules} mode-sensitive modules in training mode ({described(training)})"
        return finding(
            "GG507",
            f"The model was called {self._forwards} times with gradients enabled before a backward, where {self._most} "
            f"was the most so far, and nothing was done with the graphs of at least {gone}: an evaluation without "
            f"torch.no_grad(){f', {mode}' if training else ', in eval mode'}.",
            likely=["both_forgotten"] if training else ["no_grad_forgotten"],
            severity=Severity.WARNING if training else Severity.INFO,
            step=watch.step,
            moment=Moment.FORWARD,
            evaluation=True,
            module=paths[0] if training else None,
            module_class=type(training[0].module).__name__ if training else None,
            where=self._where,
            guard="EvalModeAssert",
            evidence={
                "forwards": self._forwards,
                "usual": self._most,
                "modules": [each.path for each in training[:50]],
            },
        )
