"""Measures what the model is called with, and gives out each call once the host has read what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.data.data_seen import MOST_ELEMENTS, Forward, hashed, looked_at, sample, size
from gpt_guard.callbacks.data.inputs import InputNames, Inputs, is_plain
from gpt_guard.callbacks.data.loaders import LoaderLog
from gpt_guard.callbacks.data.row_hashes import SameMemory, folded, row_hashes
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.watch import Watch

_PREFIX = "data."
_MOST_WAITING = 256
"""Forwards between two reads; of more (per-sample gradients) the rest is not looked at."""


class DataLog:
    """Forwards that wait for the host read. On the CPU, where reading is free, none does; holds no tensor."""

    def __init__(self, watch: Watch, loaders: LoaderLog) -> None:
        self._watch = watch
        self._loaders = loaders
        self._names = InputNames(watch.model)
        self._forwards: dict[int, Forward] = {}
        self._count = 0
        self._memory: list[SameMemory] = []
        self._before: list[SameMemory] = []
        self._group = -1

    @property
    def waiting(self) -> bool:
        """Whether anything was measured that nobody has taken."""
        return bool(self._forwards)

    def forward(self, *, evaluation: bool) -> None:
        """The model is called."""
        watch = self._watch
        now = self._loaders.current
        if evaluation and now is not None and 0 < now.trained_in < now.iterations:
            # The loader of the training was begun once more for this: the training data is evaluated on purpose.
            return
        if watch.tap.inputs is None or len(self._forwards) >= _MOST_WAITING:
            return
        inputs = self._names.split(*watch.tap.inputs)
        first = inputs.first
        inspected = watch.inspection.active and not evaluation
        if first is None or (not inspected and size(inputs) > MOST_ELEMENTS):
            return
        shape, use = tuple(first.shape), None if evaluation else now
        forward = Forward(watch.step, evaluation, inspected, shape, first.numel(), loader=use)
        forward.names, forward.floats = tuple(inputs.data), first.is_floating_point()
        if use is not None:
            use.trained_in = use.iterations
        if not evaluation:
            forward.held = self._held(inputs)
            forward.expanded = first.dim() > 0 and first.stride(0) == 0
        if inspected or evaluation:
            forward.line = user_line()
        number = self._count
        self._forwards[number], self._count = forward, number + 1
        with self._quiet():
            for name, value in hashed(inputs):
                self._put(number, name, value)
            if inspected:
                for name, value in looked_at(first):
                    self._put(number, name, value)

    def target(self, target: Tensor) -> None:
        """A loss function was called with this target, in an inspected step."""
        number = self._count - 1
        if (forward := self._forwards.get(number)) is None or forward.evaluation or target.requires_grad:
            return
        if target.numel() and is_plain(target):
            with self._quiet():
                self._put(number, "targets", folded(row_hashes(target)).reshape(1))
                if not forward.target_sample:
                    self._put(number, "target_sample", sample(target))

    def complete(self, readings: dict[str, Any]) -> Iterator[Forward]:
        """The forwards that were read, in order; each once."""
        for name, value in readings.items():
            if name.startswith(_PREFIX):
                number, what = name[len(_PREFIX) :].split(".")[:2]
                if (forward := self._forwards.get(int(number))) is not None:
                    forward.take(what, value)
        for read in [number for number, forward in self._forwards.items() if forward.digest is not None]:
            yield self._forwards.pop(read)

    def _put(self, number: int, name: str, value: Tensor) -> None:
        if self._watch.immediate:
            self._forwards[number].take(name, value.tolist())
        else:
            # Several losses have a target each: the last part keeps their names apart.
            self._watch.ledger.put(f"{_PREFIX}{number}.{name}.{len(self._watch.ledger)}", value)

    def _held(self, inputs: Inputs) -> bool:
        """Whether the data lies where that of the step before lay, as it was."""
        if self._group != self._watch.step:
            self._group = self._watch.step
            self._before, self._memory = self._memory, []
        tensors = list(inputs.data.values())
        self._memory += [SameMemory(tensor) for tensor in tensors[: _MOST_WAITING - len(self._memory)]]
        return all(any(known.is_of(tensor) for known in self._before) for tensor in tensors)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """No graph, and nobody is told of the functions that are called."""
        functions = self._watch.inspection.functions
        muted, functions.muted = functions.muted, True
        try:
            with torch.no_grad():
                yield
        finally:
            functions.muted = muted
