"""Train on one batch again and again and keep the curve, and how low the loss of that batch can get."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
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
MOST_TOKENS = 200_000
Progress = Callable[[int, int, str], None]
"""Steps done, of how many, and a figure."""


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
    progress: Progress,
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


@dataclass(frozen=True)
class Floor:
    """How low the loss gets where the same context is followed by different tokens, in nats per target that counts.

    `loss` is the entropy for a model that sees all of the context, `accuracy` the best share of right guesses.
    `bigram` is that of one that sees only the current token, `position` of one that knows where it is but not what
    stands there, `unigram` of one that knows neither: where a curve ends there, this is what the model has to go by.
    """

    loss: float
    accuracy: float
    bigram: float
    position: float
    unigram: float
    targets: int


def floor(x: Tensor, y: Tensor, *, ignore_index: int, causal: bool, shifts_inside: bool) -> Floor | None:
    """The floors of a batch of token ids `[B, T]`; None where there is nothing to count, or too much. Reads the batch.

    The context of position t is x[: t + 1] of its row, or the whole row and t for an encoder.
    """
    if x.dim() != 2 or x.shape != y.shape or x.is_floating_point() or not 0 < x.numel() <= MOST_TOKENS:
        return None
    full: dict[Hashable, Counter[int]] = defaultdict(Counter)
    current: dict[Hashable, Counter[int]] = defaultdict(Counter)
    place: dict[Hashable, Counter[int]] = defaultdict(Counter)
    nothing: Counter[int] = Counter()
    for row, targets in zip(x.tolist(), y.tolist(), strict=True):
        wanted = targets[1:] if shifts_inside else targets
        for position, (context, target) in enumerate(zip(_contexts(row, causal), wanted, strict=False)):
            if target != ignore_index:
                full[context][target] += 1
                current[row[position]][target] += 1
                place[position][target] += 1
                nothing[target] += 1
    total = nothing.total()
    if total == 0:
        return None
    return Floor(
        loss=sum(map(_nats, full.values())) / total,
        accuracy=sum(max(counts.values()) for counts in full.values()) / total,
        bigram=sum(map(_nats, current.values())) / total,
        position=sum(map(_nats, place.values())) / total,
        unigram=_nats(nothing) / total,
        targets=total,
    )


def _contexts(row: list[int], causal: bool) -> Iterator[Hashable]:
    """A short name for what is visible at each position: of a prefix, the hash of the shorter prefix and the token."""
    whole = tuple(row)
    prefix = 0
    for position, token in enumerate(row):
        prefix = hash((prefix, token))
        yield prefix if causal else (whole, position)


def _nats(counts: Counter[int]) -> float:
    """Entropy of the counts times their number, in nats."""
    total = counts.total()
    return -sum(count * math.log(count / total) for count in counts.values())
