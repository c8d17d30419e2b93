"""Ask a model again within a budget, and compare what it answers: by row, by position, or as a whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.modes.dropout import DROPOUT_CALLS, DropoutCall, active_dropout
from gpt_guard.callbacks.probes.batch import Batch
from gpt_guard.hooks.functions.function_calls import FunctionCall, FunctionCalls
from gpt_guard.hooks.isolation.compare import SAME_SHAPE, difference, rounding
from gpt_guard.hooks.isolation.rerun import Rerun
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch

LOSS_CALLS = ("cross_entropy", "nll_loss")


class OutOfBudget(Exception):
    """The next forward would take more time than the probes may."""


class ProbeAnswer(NamedTuple):
    """Floating-point outputs by position, what losses inside of forward compared, and dropout that was active."""

    outputs: dict[str, Tensor]
    scores: list[Tensor]
    dropout: list[DropoutCall]

    @property
    def tensors(self) -> list[Tensor]:
        """All that may be compared."""
        return [*self.outputs.values(), *self.scores]


class ProbeRunner:
    """Runs the model on copies of one batch; `OutOfBudget` is raised before a forward that would go over `budget`.

    Seconds are those of the forwards, until their results are there.
    """

    def __init__(self, watch: Watch, batch: Batch, budget: float) -> None:
        self.watch = watch
        self.batch = batch
        self.budget = budget
        self.rerun = Rerun(watch.model, batch.inputs, batch.autocast)
        self._spent = 0.0
        self._last = batch.seconds / 3
        self._answer = ProbeAnswer({}, [], [])

    def ask(
        self, replaced: Mapping[str, Tensor] | None = None, seed: int = 0, *, regardless: bool = False
    ) -> ProbeAnswer:
        """What the model answers; outputs are kept as they come. Call it inside of `rerun.open`.

        `regardless` of the budget: where something was found, and only its place is asked for.
        """
        if self._spent + self._last > self.budget and not regardless:
            raise OutOfBudget
        start = time.perf_counter()
        answer = self._call(replaced, seed)
        for tensor in answer.tensors[:1]:
            # An accelerator is waited for, so that its time is counted here.
            tensor.reshape(-1)[0].item()
        self._last = time.perf_counter() - start
        self._spent += self._last
        return answer

    def _call(self, replaced: Mapping[str, Tensor] | None, seed: int) -> ProbeAnswer:
        self._answer = ProbeAnswer({}, [], [])
        tap = FunctionCalls()
        tap.listen(LOSS_CALLS, self._loss)
        tap.listen(DROPOUT_CALLS, self._dropout)
        try:
            tap.open()
            output = self.rerun(replaced, seed)
        finally:
            tap.close()
            tap.clear()
        answer, self._answer = self._answer, ProbeAnswer({}, [], [])
        for position, tensor in walk(output):
            if comparable(tensor):
                answer.outputs[position] = tensor.detach()
        return answer

    def _loss(self, call: FunctionCall) -> None:
        if isinstance(scores := call.get("input"), Tensor) and comparable(scores):
            self._answer.scores.append(scores.detach())

    def _dropout(self, call: FunctionCall) -> None:
        if (found := active_dropout(call)) is not None:
            self._answer.dropout.append(found)

    def allowed(self, tensor: Tensor) -> float:
        """How far rounding may take two answers of one shape; with autocast, that of its precision."""
        largest = float(tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
        return max(rounding(tensor), SAME_SHAPE * self.rerun.eps * largest)

    def apart(self, one: ProbeAnswer, other: ProbeAnswer) -> float:
        """The largest difference that is more than rounding; 0 where there is none."""
        worst = 0.0
        for a, b in zip(one.tensors, other.tensors, strict=False):
            if a.shape == b.shape and a.numel():
                change = float(difference(a, b).max())
                worst = max(worst, change if change > self.allowed(a) else 0.0)
        return worst


def comparable(tensor: Any) -> bool:
    """A plain tensor of real numbers with something in it."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return plain and tensor.is_floating_point() and tensor.numel() > 0


def by_place(tensor: Tensor, rows: int, length: int) -> Tensor | None:
    """A tensor as `[rows, length, ...]`, from the usual layouts of what has one entry for each id; None for others.

    `[B, T, ...]`, `[T, B, ...]`, `[B * T, V]`, and what a loss compares: `[B, V, T]` and one position less.
    """
    shape = tuple(tensor.shape)
    if len(shape) == 2:
        for count in (length, length - 1):
            if count > 1 and shape[0] == rows * count:
                return tensor.reshape(rows, count, -1)
        return tensor[:, :, None] if shape == (rows, length) else None
    if len(shape) < 3:
        return None
    if shape[:2] == (rows, length):
        return tensor
    if shape[:2] == (length, rows):
        return tensor.transpose(0, 1)
    if len(shape) == 3 and shape[0] == rows and shape[2] in (length, length - 1):
        return tensor.transpose(1, 2)
    return None


def by_row(tensor: Tensor, rows: int, length: int, batch: int, *, sure: bool) -> Tensor | None:
    """A tensor with the rows of the batch in front; None where it has none, or where rows and pairs look alike.

    As many rows as tokens are distinguished only if it is `sure` which dimension is the batch.
    """
    if rows == length and not sure:
        return tensor if tensor.dim() == 2 and tensor.size(0) == rows and tensor.size(1) != rows else None
    placed = by_place(tensor, rows, length)
    if placed is not None:
        return placed.movedim(batch, 0)
    count = (rows, length)[batch]
    if tensor.dim() and tensor.size(0) == count and not (tensor.dim() > 1 and tensor.size(1) == count):
        return tensor
    return None
