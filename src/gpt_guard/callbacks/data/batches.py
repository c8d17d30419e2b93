"""What the model is called with: the data and the targets among it, measured on the device and read with the step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.data.hashes import LONGEST_ROW, MIN_ELEMENTS, SameMemory, constant, folded, row_hashes
from gpt_guard.callbacks.data.loaders import LoaderLog, LoaderUse
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.tensors import walk, watchable
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import SourceLine

TARGET_NAMES = frozenset({"y", "ys", "y_true", "target", "targets", "label", "labels", "decoder_labels"})
"""Names under which models take what their own loss compares with: nanoGPT, Hugging Face, torch's loss functions."""
MOST_ROWS = 4096
"""Rows of a batch whose hashes are kept one by one; a batch of more (the nodes of a graph) is known as a whole."""
MOST_ELEMENTS = 2**20
"""After the inspected steps a larger batch is no longer hashed: on a CPU that would take some milliseconds a step."""
FEWEST_FRACTIONS = 4
SKETCH_ROWS, SKETCH_COLUMNS = 8, 32
SAMPLE = 256
_PREFIX = "data."
_MOST_WAITING = 256
"""Forwards between two reads; of more (per-sample gradients) the rest is not looked at."""


class Inputs(NamedTuple):
    """Tensors by name; `data["x"]`, or `data["batch['ids']"]` where they lie in a structure."""

    data: dict[str, Tensor]
    targets: dict[str, Tensor]

    @property
    def first(self) -> Tensor | None:
        """The main one: the first that has a batch dimension."""
        return next((tensor for tensor in self.data.values() if tensor.dim()), None)


class InputNames:
    """Knows the names of a model's arguments; asked once, since reading a signature is slow."""

    def __init__(self, model: nn.Module) -> None:
        self._names: list[str] = []
        try:
            kinds = inspect.signature(unwrap(model).forward).parameters.values()
        except (TypeError, ValueError):
            return
        self._names = [each.name for each in kinds if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Sort the tensors of a call; those without elements, or without values of their own here, are left out."""
        found = Inputs({}, {})
        for name, value in self._arguments(args, kwargs):
            for position, tensor in walk(value):
                if tensor.numel() and is_plain(tensor):
                    last = position.rpartition("['")[2].removesuffix("']") if position else name
                    side = found.targets if TARGET_NAMES & {name, last} else found.data
                    side[name + position] = tensor
        return found

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for place, value in enumerate(args):
            yield self._names[place] if place < len(self._names) else f"input[{place}]", value
        yield from kwargs.items()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has strided values of its own that can be hashed here."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and watchable(tensor)


@dataclass
class MeasuredBatch:
    """One call of the model. `group` is the step that it belongs to; `digest` and what follows come from the host read.

    `held`: the data lay in the same memory, unchanged, as in a call of the step before. `constant`: each of the inputs
    consists of one value. `hashes` are those of the rows, empty where there are too many.
    """

    group: int
    evaluation: bool = False
    inspected: bool = False
    shape: tuple[int, ...] = ()
    numel: int = 0
    floats: bool = False
    names: tuple[str, ...] = ()
    held: bool = False
    expanded: bool = False
    loader: LoaderUse | None = None
    line: SourceLine | None = None
    digest: int | None = None
    targets: list[int] = field(default_factory=list)
    constant: bool = False
    hashes: list[int] = field(default_factory=list)
    look: list[float] = field(default_factory=list)
    columns: list[float] = field(default_factory=list)
    sketch: list[float] = field(default_factory=list)
    target_sample: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of the main input."""
        return self.shape[0] if self.shape else 1

    @property
    def telling(self) -> bool:
        """Whether equal data can be no chance."""
        return self.digest is not None and not self.constant and self.numel >= MIN_ELEMENTS

    @property
    def telling_rows(self) -> bool:
        """Whether equal rows can be no chance: no four fractions are equal by chance, a few ids may be."""
        least = FEWEST_FRACTIONS if self.floats else MIN_ELEMENTS
        return bool(self.hashes) and self.numel // self.rows >= least and not self.constant

    @property
    def whole(self) -> bool | None:
        """Whether the main input consists of whole numbers; None where that was not looked at."""
        return bool(self.look[2]) if self.look else None

    @property
    def one_row(self) -> bool:
        """Whether the batch is one row over and over."""
        return self.rows > 2 and self.telling and len(self.hashes) > 2 and len(set(self.hashes)) == 1

    def take(self, name: str, value: Any) -> None:
        """Fill in what was measured under a name."""
        if name == "hash":
            self.digest, constant_data, *self.hashes = value
            self.constant = bool(constant_data)
        elif name == "targets":
            self.targets += value
        else:
            setattr(self, name, value)


def size(inputs: Inputs) -> int:
    """Elements that a hash would look at."""
    return sum(
        min(tensor.numel(), LONGEST_ROW * max(1, tensor.shape[0])) for tensor in inputs.data.values() if tensor.dim()
    )


def hashed(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The hash of the data, whether all of it is constant, the hashes of its rows; and that of the targets."""
    first = inputs.first
    if first is None:
        return
    rows: Tensor | None = None
    rest: list[Tensor] = []
    constants: list[Tensor] = []
    for tensor in inputs.data.values():
        # What lies elsewhere (lengths on the CPU) could only be joined by waiting for the device.
        if tensor.device != first.device:
            continue
        hashes = row_hashes(tensor)
        constants.append(constant(tensor))
        if tensor.dim() and tensor.shape[0] == first.shape[0]:
            rows = hashes if rows is None else rows * 3 ^ hashes
        else:
            rest.append(folded(hashes))
    assert rows is not None, "the first tensor has rows"
    digest = folded(torch.cat([rows, *(each.reshape(1) for each in rest)]))
    kept = rows if rows.numel() <= MOST_ROWS else rows[:0]
    yield "hash", torch.cat([digest.reshape(1), torch.stack(constants).all().long().reshape(1), kept])
    ours = [folded(row_hashes(each)) for each in inputs.targets.values() if each.device == first.device]
    if ours:
        yield "targets", torch.stack(ours)
        yield "target_sample", sample(next(iter(inputs.targets.values())))


def looked_at(first: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Figures of the main input, for inspected steps: extremes, whether all is whole numbers, share of padding.

    `sketch` holds a few elements of a few rows, in reading order; `columns` of a table `[B, F]` the value of each
    constant column, and NaN for the others.
    """
    values = first.detach()
    if values.is_complex():
        return
    floats = values.is_floating_point()
    flat = values.reshape(values.shape[0], -1)
    whole = (flat == flat.round()).all() if floats else torch.ones((), device=flat.device)
    yield "look", torch.stack([flat.min().float(), flat.max().float(), whole.float(), _padding(flat, floats).float()])
    down, across = max(1, flat.shape[0] // SKETCH_ROWS), max(1, flat.shape[1] // SKETCH_COLUMNS)
    yield "sketch", flat[::down, ::across][:SKETCH_ROWS, :SKETCH_COLUMNS].float().flatten()
    if floats and values.dim() == 2 and values.shape[0] > 2 and values.shape[1] <= SAMPLE:
        same = (flat == flat[:1]).all(0)
        yield "columns", torch.where(same, flat[0].float(), torch.nan)


def sample(target: Tensor) -> Tensor:
    """The first elements of a target."""
    flat = target.detach().reshape(-1)[:SAMPLE]
    return (flat.real if flat.is_complex() else flat).float()


def _padding(ids: Tensor, floats: bool) -> Tensor:
    """The share of elements in runs of the row's last id at its end, of two or more: what padding looks like."""
    if floats or ids.shape[1] < MIN_ELEMENTS:
        return torch.zeros((), device=ids.device)
    same = (ids == ids[:, -1:]).flip(1).long().cumprod(1).sum(1)
    return torch.where(same > 1, same, 0).sum() / ids.numel()


class BatchLog:
    """Forwards that wait for the host read. On the CPU, where reading is free, none does; holds no tensor."""

    def __init__(self, watch: Watch, loaders: LoaderLog) -> None:
        self._watch = watch
        self._loaders = loaders
        self._names = InputNames(watch.model)
        self._forwards: dict[int, MeasuredBatch] = {}
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
        forward = MeasuredBatch(watch.step, evaluation, inspected, shape, first.numel(), loader=use)
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

    def complete(self, readings: dict[str, Any]) -> Iterator[MeasuredBatch]:
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
        """No graph, and no listener hears of the functions that are called."""
        functions = self._watch.inspection.functions
        muted, functions.muted = functions.muted, True
        try:
            with torch.no_grad():
                yield
        finally:
            functions.muted = muted
