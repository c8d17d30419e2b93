"""Each step of each optimizer measured: samples always, and suspects element by element where somebody asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.sampling import SampledParameters, StepFigures, local, overall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation

# 16 MB in float32: a second copy of a large model must not be what runs out of memory.
_MOST_ELEMENTS = 4_194_304


class ExactComparison(NamedTuple):
    """What one suspect did in a step: counts of compared elements, and its mean absolute value."""

    compared: int
    changed: int
    with_grad: int
    moved_with_grad: int
    magnitude: float

    @property
    def kept(self) -> float:
        """Share of the elements with a non-zero gradient whose value stayed the same; 0 without any."""
        return 1.0 - self.moved_with_grad / self.with_grad if self.with_grad else 0.0


class _Suspects:
    """Copies of the suspects, taken before a step; at most 4 million elements, evenly spread where that is not all."""

    def __init__(self, suspects: Mapping[str, Tensor]) -> None:
        self.names = list(suspects)
        self._tensors = list(suspects.values())
        self._most = max(1, _MOST_ELEMENTS // max(1, len(suspects)))
        self._before = [self._spread(tensor).clone() for tensor in self._tensors]
        self._grads: list[Tensor | None] = []

    def take_grads(self) -> None:
        """Note which elements have a gradient; before the step, or after it where a closure made them."""
        self._grads = [self._has_grad(tensor) for tensor in self._tensors]

    def compare(self) -> Tensor:
        """One float64 vector `[4 * n]` on the device: changed, with gradient, both, and the mean absolute value."""
        device = self._before[0].device
        parts = []
        for tensor, before, grads in zip(self._tensors, self._before, self._grads, strict=True):
            changed = self._spread(tensor) != before
            with_grad = torch.zeros_like(changed) if grads is None else grads
            counts = [changed.sum(), with_grad.sum(), (changed & with_grad).sum(), before.abs().double().mean()]
            parts += [count.to(device, torch.float64) for count in counts]
        self._tensors, self._grads = [], []
        return torch.stack(parts)

    def unpack(self, numbers: list[float]) -> dict[str, ExactComparison]:
        """The comparisons by name, once the host has read the vector."""
        found = {}
        for place, (name, before) in enumerate(zip(self.names, self._before, strict=True)):
            changed, with_grad, both, magnitude = numbers[4 * place : 4 * place + 4]
            found[name] = ExactComparison(before.numel(), int(changed), int(with_grad), int(both), magnitude)
        return found

    def _spread(self, tensor: Tensor) -> Tensor:
        values = local(tensor)
        flat = tensor.detach().new_zeros(0) if values is None else values.reshape(-1)
        stride = max(1, flat.numel() // self._most)
        # One more, and the stride no longer divides the row length: every column has its turn.
        return flat[:: stride + (stride > 1 and stride % 2 == 0)]

    def _has_grad(self, tensor: Tensor) -> Tensor | None:
        grad = tensor.grad
        if grad is None:
            return None
        return self._spread(grad.to_dense() if grad.layout is torch.sparse_coo else grad) != 0


@dataclass
class MeasuredStep:
    """One measured step of the optimizer that holds `sampled`; `exact` where suspects were compared element by element.

    `closure` and `scaling` are what the watch said of it.
    """

    sampled: SampledParameters
    closure: bool
    scaling: bool
    suspects: _Suspects | None
    figures: StepFigures | None = None
    exact: dict[str, ExactComparison] | None = None


class UpdateSampler:
    """Takes samples before and after each step, and exact copies of suspects in the step after somebody asked.

    `size` is the number of elements per tensor, None for all; `every` the steps from one measured step to the next.
    """

    def __init__(self, watch: Watch, size: int | None, every: int) -> None:
        self.sampled: dict[int, SampledParameters] = {}
        self._watch = watch
        self._size = size
        self._every = every
        self._wanted: dict[int, list[str]] = {}
        self._measuring: SampledParameters | None = None
        self._suspects: _Suspects | None = None
        self._waiting: dict[tuple[int, int], MeasuredStep] = {}

    def compare_exactly(self, index: int, suspects: Sequence[str]) -> None:
        """Have these parameters compared element by element in the next measured step of optimizer `index`."""
        if suspects:
            self._wanted[index] = list(suspects)

    def before(self, optimizer: Optimizer) -> None:
        """Copy the values before a step."""
        self._measuring = self._suspects = None
        if self._every > 1 and self._watch.step % self._every:
            return
        sampled = self._current(optimizer)
        if not sampled.names:
            return
        sampled.take()
        self._measuring = sampled
        wanted = self._wanted.pop(sampled.index, ())
        known = {name: each for name, each in zip(sampled.names, sampled.tensors, strict=True) if name in set(wanted)}
        if known:
            self._suspects = _Suspects(known)
            if not self._watch.closure:
                self._suspects.take_grads()

    def _current(self, optimizer: Optimizer) -> SampledParameters:
        """What this optimizer holds now."""
        watch = self._watch
        index = watch.index_of(optimizer)
        sampled = self.sampled.get(index)
        if sampled is None or sampled.outdated(optimizer):
            if sampled is not None:
                # Another set of parameters: what was right in the first steps may be wrong now.
                watch.inspection.restart(within_step=True)
            sampled = self.sampled[index] = SampledParameters(watch, index, self._size)
        return sampled

    def after(self, optimizer: Optimizer) -> None:
        """Compare with the values after the step, and have the figures read: at once where that is free."""
        sampled, suspects = self._measuring, self._suspects
        self._measuring = self._suspects = None
        vectors = sampled.compare() if sampled is not None else ()
        if sampled is None or not vectors:
            return
        watch, ledger = self._watch, self._watch.ledger
        measured = MeasuredStep(sampled, watch.closure, watch.scaling, suspects)
        if watch.immediate:
            figures = measured.figures = StepFigures.unpack(sampled.places, [vector.tolist() for vector in vectors])
            ledger.put("update_ratio", figures.ratio)
            ledger.put("max_update", figures.largest)
        else:
            ratio, largest = overall(vectors)
            ledger.put("update_ratio", ratio)
            ledger.put("max_update", largest.clone())
            for place, vector in enumerate(vectors):
                ledger.put(f"param_delta.{place}", vector.clone())
        # A fused optimizer takes the scaler's verdict along and skips by itself.
        if isinstance(overflow := getattr(optimizer, "found_inf", None), Tensor):
            ledger.put("param_delta.found_inf", overflow)
        if suspects is not None:
            if watch.closure:
                suspects.take_grads()
            ledger.put("param_delta.exact", suspects.compare())
        self._waiting[(watch.step, sampled.index)] = measured

    def read(self, seen: Observation) -> tuple[MeasuredStep, StepFigures] | None:
        """What was measured in this step, with its figures; None if nothing was, or the optimizer skipped the step."""
        measured = self._waiting.pop((seen.step, seen.optimizer), None)
        if measured is None or seen.readings.get("param_delta.found_inf"):
            return None
        figures = measured.figures
        if figures is None:
            places = measured.sampled.places
            vectors = [seen.readings[f"param_delta.{place}"] for place in range(len(places))]
            figures = measured.figures = StepFigures.unpack(places, vectors)
        if measured.suspects is not None:
            measured.exact = measured.suspects.unpack(seen.readings["param_delta.exact"])
        return measured, figures
