"""Train on one batch again and again, and keep the curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpt_guard.checks.gradients.backward import Task, trainable
from gpt_guard.checks.optimizer.steps import default_optimizer
from gpt_guard.checks.runner.forward import call

CLIP = 1.0
_TAIL = 10
_PASSES = 4
_EVERY = 10


@dataclass
class Curve:
    """The loss before each step, and at the end: in training mode over the last steps, in eval mode, and accuracy.

    `accuracy` is the share of the targets that count whose logit is the largest; None where the logits have no such
    shape. `stopped` is the step whose loss was not finite. `noise` is by how much the losses of a few passes with
    the same weights differ, in training mode and in eval mode. `grad_norm` is the largest one before clipping.
    """

    losses: list[float] = field(default_factory=list)
    end: float = math.nan
    tail: float = math.nan
    quiet: float = math.nan
    accuracy: float | None = None
    vocab_size: int | None = None
    stopped: int | None = None
    noise: tuple[float, float] = (0.0, 0.0)
    grad_norm: float = 0.0

    @property
    def start(self) -> float:
        """The loss before the first step."""
        return self.losses[0]

    def mean(self, begin: float, end: float) -> float:
        """The mean loss between two shares of the run, such as 0.9 and 1.0."""
        part = self.losses[int(begin * len(self.losses)) : max(1, int(end * len(self.losses)))]
        return sum(part) / max(1, len(part))

    def points(self, count: int = 13) -> list[tuple[int, float]]:
        """Steps and losses, evenly spread, first and last among them."""
        last = len(self.losses) - 1
        places = sorted({round(last * index / (count - 1)) for index in range(count)})
        return [(place, self.losses[place]) for place in places]


def memorise(
    model: nn.Module,
    task: Task,
    steps: int,
    progress: Callable[[int, int, str], None],
    *,
    lr: float = 1e-3,
    shifts_inside: bool = False,
) -> Curve:
    """Train `steps` steps with AdamW, gradients clipped to 1.0. Changes the model; reads the loss at each step.

    Stops at the first loss that is not finite. Raises ValueError where nothing is trainable.
    """
    optimizer = default_optimizer(model, lr)
    model.train()
    curve = Curve()
    with torch.enable_grad():
        for step in range(steps):
            optimizer.zero_grad()
            loss = task.loss(model)
            curve.losses.append(float(loss.detach()))
            if not math.isfinite(curve.losses[-1]):
                curve.stopped = step
                return curve
            if loss.requires_grad:
                loss.backward()
                norm = nn.utils.clip_grad_norm_(trainable(model).values(), CLIP)
                curve.grad_norm = max(curve.grad_norm, float(norm))
                optimizer.step()
            if step % _EVERY == 0 or step == steps - 1:
                progress(step + 1, steps, f"loss {curve.losses[-1]:.3f}")
    _judge_end(model, task, curve, shifts_inside)
    return curve


@torch.no_grad()
def _judge_end(model: nn.Module, task: Task, curve: Curve, shifts_inside: bool) -> None:
    """The last losses in training mode, and the one in eval mode, in which dropout is no noise; the better one counts.

    BatchNorm can be worse in eval mode, dropout in training mode; each is only asked whether the batch was learned.
    """
    curve.tail = sum(curve.losses[-_TAIL:]) / len(curve.losses[-_TAIL:])
    found = [_accuracy(model, task, curve, shifts_inside)]
    loud = [float(task.loss(model)) for _ in range(_PASSES)]
    model.eval()
    quiet = [float(task.loss(model)) for _ in range(_PASSES)]
    found.append(_accuracy(model, task, curve, shifts_inside))
    curve.quiet = quiet[0]
    curve.noise = (max(loud) - min(loud), max(quiet) - min(quiet))
    known = [value for value in found if value is not None]
    curve.accuracy = max(known) if known else None
    curve.end = min(value for value in (curve.tail, curve.quiet, math.inf) if not math.isnan(value))


def _accuracy(model: nn.Module, task: Task, curve: Curve, shifts_inside: bool) -> float | None:
    logits: Tensor = call(model, task.x, task.y).logits
    y = task.y
    if logits.dim() != y.dim() + 1 or logits.shape[:-1] != y.shape:
        return None
    curve.vocab_size = logits.size(-1)
    if shifts_inside:
        logits, y = logits[:, :-1], y[:, 1:]
    counted = y != task.ignore_index
    right = (logits.argmax(-1) == y) & counted
    return float(right.sum() / counted.sum()) if bool(counted.any()) else None
