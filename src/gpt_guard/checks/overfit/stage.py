"""Stage 11: can the model learn one batch by heart?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import Task, trainable
from gpt_guard.checks.gradients.diagnosis import frozen_finding
from gpt_guard.checks.overfit.floor import floor
from gpt_guard.checks.overfit.memorise import Curve, memorise
from gpt_guard.checks.overfit.overfit_verdict import Goal, goal, reached, slow, verdict
from gpt_guard.checks.overfit.seed_model import Learner, cut, learner
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.hooks.isolation.preserve import preserved, seed_all
from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import number

DROPOUT = 0.2
Progress = Callable[[int, int, str], None]


@dataclass
class Outcome:
    """One run: the curve, what it had to reach, and the finding if it did not; `note` where it nearly did."""

    curve: Curve
    aim: Goal
    wrong: Finding | None
    note: Finding | None = None

    @property
    def words(self) -> str:
        """The curve in a few figures."""
        curve = self.curve
        if curve.stopped is not None:
            return f"loss {number(curve.start)}, {curve.losses[-1]} at step {curve.stopped}"
        middle = ", ".join(f"{number(loss)} after {step}" for step, loss in curve.points(4)[1:-1] if step)
        right = f"; {curve.accuracy:.1%} right" if curve.accuracy is not None else ""
        return (
            f"loss {number(curve.start)}, {middle}{', ' if middle else ''}{number(curve.end)} "
            f"after {len(curve.losses)} steps{right}"
        )


class OverfitStage(Stage):
    """A fresh small model of the same class, or the user's own, learns one batch: the test of the whole chain."""

    number = 11
    name = "overfit"
    title = "One batch is learned by heart"
    after = ("shapes",)

    def missing(self, subject: Subject) -> str | None:
        """A model, or a way to make one, and a batch."""
        if subject.model is None and subject.make_model is None:
            return "no model"
        return "no batch, and no data to cut one from" if subject.inputs is None else None

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """The curve of the batch against what it can come down to; on request, what dropout changes in it."""
        who, inputs = learner(subject), subject.inputs
        if who is None or inputs is None:
            return
        task = Task(*cut(*inputs, who.block, subject.ignore_index), subject.loss_fn, subject.ignore_index)
        outcome = self._train(subject, who, task, 0.0)
        if outcome is None:
            model = subject.model if subject.model is not None else who.make(0.0)
            yield self.failed("trainable parameters", "0", "at least 1", frozen_finding(model))
            return
        curve, aim = outcome.curve, outcome.aim
        rows = "x".join(str(length) for length in task.x.shape)
        measured = f"{outcome.words} ({who.words}, batch {rows}, AdamW 1e-3, clipping 1.0)"
        facts: dict[str, Any] = {
            "overfit_loss": curve.losses[-1] if curve.stopped is not None else curve.end,
            "overfit_accuracy": curve.accuracy,
            "overfit_curve": [[step, loss] for step, loss in curve.points()],
        }
        if outcome.wrong is not None:
            yield self.failed("one batch", measured, aim.words, outcome.wrong, **facts)
        else:
            notes = [outcome.note] if outcome.note is not None else []
            yield self.passed("one batch", measured, aim.words, notes=notes, **facts)
        if subject.compare_dropout:
            yield self._compare(subject, who, task, curve)

    def _train(self, subject: Subject, who: Learner, task: Task, dropout: float) -> Outcome | None:
        seed_all(subject.seed)
        model = subject.model if who.own else None
        # What was built here is thrown away; what is the user's is put back before the next run.
        with preserved(model) if model is not None else nullcontext():
            return learn(
                who,
                task,
                subject.overfit_steps,
                subject.progress,
                dropout=dropout,
                causal=subject.causal,
                shifts_inside=subject.shifts_inside,
            )

    def _compare(self, subject: Subject, who: Learner, task: Task, without: Curve) -> CheckResult:
        title = f"dropout 0.0 against {DROPOUT}"
        if not who.has_dropout:
            return self.skipped(title, "no dropout found, neither in the config nor as a module")
        outcome = self._train(subject, who, task, DROPOUT)
        with_it = outcome.curve if outcome is not None else without
        measured = (
            f"loss at the end {number(without.tail)} without, {number(with_it.tail)} with dropout "
            f"({number(with_it.quiet)} in eval mode)"
        )
        facts: dict[str, Any] = {"overfit_loss_dropout": with_it.tail}
        expected = "higher with dropout: a batch is harder to learn by heart"
        if with_it.losses == without.losses:
            seen = f"With dropout {DROPOUT} each of {len(without.losses)} losses is the same as without, bit by bit."
            return self.failed(title, measured, expected, finding("GG677", seen), **facts)
        return self.passed(title, measured, expected, **facts)


def learn(
    who: Learner,
    task: Task,
    steps: int,
    progress: Progress,
    *,
    dropout: float = 0.0,
    lr: float = 1e-3,
    causal: bool = True,
    shifts_inside: bool = False,
) -> Outcome | None:
    """Let one model learn one batch, and judge the curve; None where nothing in it is trainable."""
    model = who.make(dropout)
    if not trainable(model):
        return None
    device = next(iter(trainable(model).values())).device
    task = Task(task.x.to(device), task.y.to(device), task.loss_fn, task.ignore_index)
    limits = floor(task.x, task.y, ignore_index=task.ignore_index, causal=causal, shifts_inside=shifts_inside)
    curve = memorise(model, task, steps, progress, lr=lr, shifts_inside=shifts_inside)
    aim = goal(curve, limits, own=who.own, share=who.share)
    good = reached(curve, aim) and math.isfinite(curve.end)
    wrong = None if good else verdict(curve, aim, limits, steps)
    note = slow(curve, aim, wrong) if wrong is not None else None
    return Outcome(curve, aim, None if note is not None else wrong, note)
