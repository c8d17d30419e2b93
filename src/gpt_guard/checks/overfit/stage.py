"""Stage 11: can the model learn one batch by heart? And where it cannot, what the shape of its curve comes from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import Task, trainable
from gpt_guard.checks.gradients.diagnosis import frozen_finding
from gpt_guard.checks.overfit.memorise import Curve, Floor, Progress, floor, memorise
from gpt_guard.checks.overfit.seed_model import Learner, cut, learner
from gpt_guard.checks.runner.base import BATCH, MODEL, Need, Stage, Subject
from gpt_guard.hooks.isolation.preserve import preserved, seed_all
from gpt_guard.records import CheckResult, Finding, Severity
from gpt_guard.records.render import number

DROPOUT = 0.2
SHARE = 0.1
"""A tenth of the way from the lowest possible loss to the first one. Seed models on random targets pass it after half
of 300 steps; a model with a part that does not work stays above a quarter (both measured)."""
NEARLY = 0.25
"""Above this share of the way lies a model with a part that does not work; one below it that still falls is slow."""
ACCURACY = 0.99
"""Share of the best possible accuracy that counts as learned where the loss has come half of the way: label smoothing
and added terms keep a loss up that is learned by heart. Probabilities in place of logits keep it above that."""
FROZEN_SHARE = 0.9
"""Where a part is frozen, nothing can be asked but that the loss falls, to nine tenths at least."""
_FLAT = 0.02
_FALLING = 0.05
_JUMPY = 0.25
_NEAR = 0.05
_RANDOM = 1e-3
_FEW_STEPS = 100


class OverfitStage(Stage):
    """A fresh small model of the same class, or the user's own, learns one batch: the test of the whole chain."""

    number = 11
    name = "overfit"
    title = "One batch is learned by heart"
    after = ("shapes",)
    needs = (
        Need(lambda subject: subject.model if subject.model is not None else subject.make_model, MODEL.words),
        BATCH,
    )

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """The curve of the batch against what it can come down to; on request, what dropout changes in it."""
        who = learner(subject)
        task = Task(*cut(*BATCH(subject), who.block, subject.ignore_index), subject.loss_fn, subject.ignore_index)
        run = self._train(subject, who, task, 0.0)
        if run is None:
            model = subject.model if subject.model is not None else who.make(0.0)
            yield self.line("trainable parameters", "0", "at least 1", frozen_finding(model))
            return
        curve = run.curve
        rows = "x".join(str(length) for length in task.x.shape)
        measured = f"{run.words} ({who.words}, batch {rows}, AdamW 1e-3, clipping 1.0)"
        facts: dict[str, Any] = {
            "overfit_loss": curve.losses[-1] if curve.stopped is not None else curve.end,
            "overfit_accuracy": curve.accuracy,
            "overfit_curve": [[step, loss] for step, loss in curve.points()],
        }
        yield self.line("one batch", measured, run.aim.words, run.found, **facts)
        if subject.compare_dropout:
            yield self._compare(subject, who, task, curve)

    def _train(self, subject: Subject, who: Learner, task: Task, dropout: float) -> OverfitRun | None:
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
        run = self._train(subject, who, task, DROPOUT)
        with_it = run.curve if run is not None else without
        measured = (
            f"loss at the end {number(without.tail)} without, {number(with_it.tail)} with dropout "
            f"({number(with_it.quiet)} in eval mode)"
        )
        expected, wrong = "higher with dropout: a batch is harder to learn by heart", None
        if with_it.losses == without.losses:
            seen = f"With dropout {DROPOUT} each of {len(without.losses)} losses is the same as without, bit by bit."
            wrong = finding("GG677", seen)
        return self.line(title, measured, expected, wrong, overfit_loss_dropout=with_it.tail)


@dataclass(frozen=True)
class Goal:
    """What the loss has to come down to, and why: `lowest` is what this batch allows, `start` what it falls from."""

    start: float
    lowest: float
    target: float
    best_accuracy: float
    frozen: bool

    @property
    def words(self) -> str:
        """The goal as the expected figure of a line."""
        if self.start <= 0:
            return "a loss that starts above 0, as a cross entropy does"
        if self.frozen:
            return f"a loss of at most {number(self.target)} (a part is frozen: it has to fall, not more)"
        text = f"at most {number(self.target)}, a tenth of {number(self.start)}"
        if self.lowest > 0.005:
            lowest = f"{number(self.lowest)}, the lowest of this batch"
            text = f"at most {number(self.target)}, a tenth of the way up from {lowest}"
        return f"{text}, or half of the way with {ACCURACY * self.best_accuracy:.1%} of the targets right"


@dataclass(frozen=True)
class OverfitRun:
    """One run: the curve, what it had to reach, and what is to be said: an error, or a warning where it nearly did."""

    curve: Curve
    aim: Goal
    found: Finding | None

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
) -> OverfitRun | None:
    """Let one model learn one batch, and judge the curve; None where nothing in it is trainable."""
    model = who.make(dropout)
    if not trainable(model):
        return None
    device = next(iter(trainable(model).values())).device
    task = Task(task.x.to(device), task.y.to(device), task.loss_fn, task.ignore_index)
    limits = floor(task.x, task.y, ignore_index=task.ignore_index, causal=causal, shifts_inside=shifts_inside)
    curve = memorise(model, task, steps, progress, lr=lr, shifts_inside=shifts_inside)
    aim = goal(curve, limits, own=who.own, share=who.share)
    return OverfitRun(curve, aim, judge(curve, aim, limits, steps))


def goal(curve: Curve, limits: Floor | None, *, own: bool, share: float) -> Goal:
    """The goal for one curve. A model with trained weights starts low, and is measured from log V instead."""
    start = curve.start
    if own and curve.vocab_size:
        start = max(start, math.log(curve.vocab_size))
    lowest = limits.loss if limits is not None and limits.loss < start else 0.0
    frozen = share < 1.0
    target = FROZEN_SHARE * curve.start if frozen else lowest + SHARE * (start - lowest)
    return Goal(start, lowest, target, limits.accuracy if limits is not None else 1.0, frozen)


def judge(curve: Curve, aim: Goal, limits: Floor | None, steps: int) -> Finding | None:
    """The finding for a curve that did not reach its goal: its code is the shape, its causes fit the evidence.

    A warning only where the curve is nearly there and still falls.
    """
    if _reached(curve, aim):
        return None
    code, likely, why = _shape(curve, aim, limits, steps)
    nearly = not aim.frozen and curve.end <= aim.lowest + NEARLY * (aim.start - aim.lowest)
    points = ", ".join(f"{number(loss)} at step {step}" for step, loss in curve.points(7))
    right = "" if curve.accuracy is None else f" {curve.accuracy:.1%} of the targets are right at the end."
    evidence: dict[str, Any] = {
        "losses": [[step, loss] for step, loss in curve.points()],
        "accuracy": curve.accuracy,
        "target": aim.target,
        "floor": aim.lowest,
    }
    severity = Severity.WARNING if code == "GG672" and nearly else Severity.ERROR
    return finding(code, f"{why} The loss is {points}.{right}", likely=likely, evidence=evidence, severity=severity)


def _reached(curve: Curve, aim: Goal) -> bool:
    """Whether the batch was learned: a low loss that comes with right answers, or right answers alone."""
    if curve.stopped is not None or not math.isfinite(curve.end):
        return False
    if _below_zero(curve, aim):
        return False
    right = curve.accuracy is not None and curve.accuracy >= ACCURACY * aim.best_accuracy
    low = curve.end <= aim.target and not _hollow(curve, aim)
    return low or (right and curve.end <= (aim.start + aim.lowest) / 2)


def _shape(curve: Curve, aim: Goal, limits: Floor | None, steps: int) -> tuple[str, list[str], str]:
    if curve.stopped is not None:
        at_once = curve.stopped == 0
        seen = f"The loss is {curve.losses[-1]} at step {curve.stopped}."
        return "GG673", ["from_start"] if at_once else ["overflow"], seen
    if _below_zero(curve, aim):
        seen = f"The loss has fallen below 0, to {number(curve.end)}, where a cross entropy cannot be."
        return "GG676", ["sign"], seen
    if curve.end <= aim.target:
        low = f"The loss ends at {number(curve.end)}, and the targets are not what the logits say."
        return "GG676", ["sign"] if curve.end < aim.lowest - _FLAT * aim.start else ["other_targets"], low
    if steps < _FEW_STEPS and curve.end < curve.start:
        return "GG672", ["few_steps"], f"After {steps} steps the loss is at {number(curve.end)}."
    if (noise := _noise(curve)) is not None:
        return "GG674", [noise[0]], noise[1]
    tail = curve.losses[-max(10, len(curve.losses) // 5) :]
    mean = sum(tail) / len(tail)
    jumps = sum(abs(one - other) for one, other in itertools.pairwise(tail)) / max(1, len(tail) - 1)
    if jumps > _JUMPY * abs(mean):
        seen = f"Over the last {len(tail)} steps the loss is {number(mean)} and changes by {number(jumps)} in a step."
        return "GG674", ["unstable"], seen
    if mean > (1 + _FLAT) * curve.start:
        return "GG675", [], f"The loss has grown from {number(curve.start)} to {number(mean)}."
    if abs(curve.start - curve.end) < _FLAT * curve.start:
        return _flat(curve)
    return _stalled(curve, aim, limits, steps)


def _noise(curve: Curve) -> tuple[str, str] | None:
    """Passes with the same weights that differ: in training mode alone, or in eval mode, too."""
    for mode, noise in zip(("eval", "training"), reversed(curve.noise), strict=True):
        if noise > _RANDOM * abs(curve.end):
            seen = f"Passes with the same weights in {mode} mode give losses that differ by {number(noise)}."
            return ("random_forward" if mode == "eval" else "dropout"), seen
    return None


def _flat(curve: Curve) -> tuple[str, list[str], str]:
    still = curve.grad_norm == 0.0
    seen = f"The loss stays at {number(curve.end)}{', for every gradient is zero' if still else ''}."
    if curve.vocab_size and abs(curve.end - math.log(curve.vocab_size)) < _NEAR * curve.end:
        seen += f" That is log V = {number(math.log(curve.vocab_size))}: an even guess over {curve.vocab_size} tokens."
    return "GG670", ["nothing_moves"] if still else ["no_signal"], seen


def _stalled(curve: Curve, aim: Goal, limits: Floor | None, steps: int) -> tuple[str, list[str], str]:
    """It fell and then came to rest, or is still falling."""
    before, now = curve.mean(0.7, 0.8), curve.mean(0.9, 1.0)
    if before - now > _FALLING * (curve.start - curve.end):
        return "GG672", [], f"After {steps} steps the loss is at {number(curve.end)} and still falls."
    if (known := _plateau(curve, aim, limits)) is not None:
        return "GG671", [known[0]], f"The loss comes to rest at {number(curve.end)}, {known[1]}."
    return "GG671", [], f"The loss comes to rest at {number(curve.end)}, above {number(aim.target)}."


def _plateau(curve: Curve, aim: Goal, limits: Floor | None) -> tuple[str, str] | None:
    """Values at which a curve rests for a reason: two softmaxes in a row, no context, no input at all."""
    size = curve.vocab_size
    guessed = curve.accuracy is None or curve.accuracy > 0.5 * aim.best_accuracy
    if size is not None and size > 2 and guessed:
        # Logits that are probabilities: at best 1 for the target and 0 for the others.
        twice = math.log(math.e + size - 1) - 1
        if abs(curve.end - twice) < _NEAR * twice and abs(curve.start - math.log(size)) < _NEAR * curve.start:
            return (
                "double_softmax",
                f"the least that cross entropy gives for probabilities in place of logits ({number(twice)})",
            )
    if limits is None or limits.targets < 16:
        return None
    if limits.position > 1.5 * aim.target and abs(curve.end - limits.position) < _NEAR * limits.position:
        return "no_input", f"the entropy of the targets given their position alone ({number(limits.position)})"
    if limits.unigram > 1.5 * aim.target and abs(curve.end - limits.unigram) < _NEAR * limits.unigram:
        return "no_input", f"the entropy of the targets by themselves ({number(limits.unigram)})"
    if limits.bigram > 1.5 * aim.target and abs(curve.end - limits.bigram) < 2 * _NEAR * limits.bigram:
        return "no_context", f"the entropy of a target given the current token alone ({number(limits.bigram)})"
    return None


def _below_zero(curve: Curve, aim: Goal) -> bool:
    """A loss of token targets that began above 0 and ends clearly below it: nothing bounds it."""
    return curve.vocab_size is not None and curve.start > 0 > curve.end + _FLAT * aim.start


def _hollow(curve: Curve, aim: Goal) -> bool:
    """A low loss beside wrong answers, or one below what is possible: it measures something else."""
    if aim.frozen:
        return False
    wrong = curve.accuracy is not None and curve.accuracy < 0.8 * aim.best_accuracy
    return wrong or (curve.accuracy is None and curve.end < aim.lowest - _FLAT * aim.start)
