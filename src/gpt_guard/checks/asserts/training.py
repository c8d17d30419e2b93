"""Assertions for a person's own tests: gradients reach every parameter, a step changes each, a batch is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.checks.gradients.backward import Task
from gpt_guard.checks.gradients.diagnosis import frozen_finding
from gpt_guard.checks.gradients.stage import GradientsStage
from gpt_guard.checks.optimizer.stage import OptimizerStage
from gpt_guard.checks.overfit.seed_model import Learner, own_learner
from gpt_guard.checks.overfit.stage import learn
from gpt_guard.checks.runner.base import LossFunction, Stage, Subject
from gpt_guard.checks.runner.forward import shifts_inside
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.isolation.random_state import seed_all
from gpt_guard.records import Severity


def assert_gradients_reach_all(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss_fn: LossFunction | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    seed: int = 42,
) -> None:
    """Every trainable parameter gets a gradient that is finite and not zero, on this batch, or after a few steps.

    `x` and `y` are token ids `[B, T]`; the loss is `loss_fn(logits, y)`, else the model's own, else cross entropy.
    Zero-initialised factors, idle experts and frozen parts are no failure. The model is as before afterwards. Raises
    CheckFailed with a finding for each cause.
    """
    _hold(GradientsStage(), _subject(model, x, y, loss_fn, vocab_size, ignore_index), seed)


def assert_step_changes_parameters(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    optimizer: Optimizer | None = None,
    *,
    loss_fn: LossFunction | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    seed: int = 42,
) -> None:
    """The optimizer holds exactly the trainable parameters, with lr above 0, and a step changes each of them.

    The step starts from an empty optimizer state, so that no old momentum hides anything; without an optimizer it is
    that of AdamW at lr 1e-3. Model and optimizer are as before afterwards. Raises CheckFailed with a finding for each
    cause.
    """
    subject = _subject(model, x, y, loss_fn, vocab_size, ignore_index)
    subject.optimizer = optimizer
    _hold(OptimizerStage(), subject, seed)


def assert_overfits(
    model: nn.Module | Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 300,
    lr: float = 1e-3,
    loss_fn: LossFunction | None = None,
    causal: bool = True,
    ignore_index: int = -100,
    seed: int = 42,
) -> None:
    """A model (as it is, and put back afterwards), or the one that a function makes, learns one batch by heart.

    AdamW at `lr` with clipping 1.0 and dropout set to 0. Learned means: the loss is down to a tenth of the way between
    its start and the lowest value that the batch allows, where equal beginnings go on differently; or 99 % of the
    targets are right at half of that way. A small model makes a fast test: block 32, width 64, 2 layers take about two
    seconds. Raises CheckFailed with one finding whose code is the shape of the curve.
    """
    if steps < 1:
        raise GuardUsageError(f"steps is {steps}; give at least 1, and about 300 for a verdict")
    with _fresh(model if isinstance(model, nn.Module) else None, None, (x, y), seed):
        who = own_learner(model, x.size(-1)) if isinstance(model, nn.Module) else _made(model, x.size(-1))
        built = who.make(0.0)
        inside = shifts_inside(built, x.to(next(built.parameters()).device))
        task = Task(x, y, loss_fn, ignore_index)
        seed_all(seed)
        run = learn(who, task, steps, _quiet, lr=lr, causal=causal, shifts_inside=inside)
        if run is None:
            raise CheckFailed(frozen_finding(built))
    if run.found is not None and run.found.severity is Severity.ERROR:
        raise CheckFailed(run.found)


def _made(make: Callable[[], nn.Module], block: int) -> Learner:
    def build(_dropout: float) -> nn.Module:
        return own_learner(make(), block).make(0.0)

    return Learner(build, "the model that was made", block)


def _subject(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction | None, vocab_size: int | None, ignore_index: int
) -> Subject:
    return Subject(model=model, batch=(x, y), loss_fn=loss_fn, vocab_size=vocab_size, ignore_index=ignore_index)


def _hold(stage: Stage, subject: Subject, seed: int) -> None:
    """Raise CheckFailed for the lines that fail, with all their findings, each once."""
    with _fresh(subject.model, subject.optimizer, subject.batch or (), seed):
        failed = [result for result in stage.run(subject) if result.status == "failed"]
    findings = {finding.cause: finding for result in failed for finding in result.findings}
    if findings:
        raise CheckFailed(findings.values())


@contextmanager
def _fresh(
    model: nn.Module | None, optimizer: Optimizer | None, tensors: tuple[Tensor, ...], seed: int
) -> Iterator[None]:
    with preserved(model, optimizer, tensors), torch.enable_grad():
        seed_all(seed)
        yield


def _quiet(*_: Any) -> None:
    return None
