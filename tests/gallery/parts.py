"""What a case of the gallery is: a small training that goes wrong, and what must be told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map

from gpt_guard import Finding, GuardError, Guardian
from gpt_guard.catalogue import entry
from gpt_guard.records import SourceLine

# A dtype is that of weights and batch; "amp" keeps them in float32 and runs under autocast.
Precision = Literal["float32", "bfloat16", "float16", "amp-bfloat16", "amp-float16"]
FULL: tuple[Precision, ...] = ("float32",)
HALF: tuple[Precision, ...] = ("float16",)
HALVES: tuple[Precision, ...] = ("float16", "amp-float16")
MIXED: tuple[Precision, ...] = ("float32", "amp-bfloat16")
WIDE: tuple[Precision, ...] = ("float32", "bfloat16", "amp-bfloat16")
ALL: tuple[Precision, ...] = ("float32", "bfloat16", "float16", "amp-bfloat16")
SEED = 0
HERE = Path(__file__).parent


@dataclass
class Training:
    """A training as a user would have it: a model, batches, and a loss outside of the model, if it has one.

    Without `loss`, the model returns the loss itself. A batch is what the model is given and what the loss is given
    beside the output.
    """

    model: nn.Module
    batches: Iterable[tuple[tuple[Any, ...], tuple[Any, ...]]]
    loss: Callable[..., Tensor] | None = None
    optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.01)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Case:
    """What must be told of a training: operation, phase, module path, a piece of the line, and the cause.

    `operation` is the word for it, or the kind of tensor that was bad before any operation ran. `cause` is to be first
    or second among those told. `line` is "" where there is none: after a step, no line of the user's has run.
    """

    train: Callable[[], Training]
    operation: str
    module: str | None
    line: str
    cause: str
    phase: str = "forward"
    runs: tuple[Precision, ...] = FULL

    @property
    def name(self) -> str:
        return self.train.__name__

    @property
    def places(self) -> list[tuple[str, int]]:
        """File and number of each line that holds the piece: exactly one, in the gallery's own files."""
        return [
            (str(file), number)
            for file in sorted(HERE.glob("*.py"))
            for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
            if self.line in text and f'"{self.line}"' not in text
        ]


@dataclass(frozen=True)
class Told:
    """What a finding says: by its replay, or by the guard where there was nothing to run again."""

    operation: str
    module: str | None
    phase: str
    where: SourceLine | None
    causes: tuple[str, ...]
    shows: str


# What a guard knows without a replay.
_FOUND = {"GG103": "batch", "GG105": "parameter", "GG106": "update", "GG107": "buffer"}


def told(finding: Finding) -> Told:
    """What is said of the place and the cause; the keys of causes are those of operations, or of the finding's code."""
    seen = finding.operation
    if seen is None:
        known = {cause.text: cause.key for cause in entry(finding.code).causes}
        keys = tuple(known.get(text, "") for text in finding.causes)
        operation = _FOUND.get(finding.code, "nothing")
        return Told(operation, finding.module, str(finding.moment), finding.where, keys, finding.seen)
    keys = tuple(cause.key for cause in seen.causes)
    operation = seen.name if seen.kind == "operation" else seen.kind
    return Told(operation, seen.module, seen.phase, seen.where, keys, seen.shows)


@dataclass
class Loop:
    """The training of a case, one step at a time."""

    training: Training
    precision: Precision

    def __post_init__(self) -> None:
        self.dtype = torch.float32 if self.precision.startswith("amp") else getattr(torch, self.precision)
        self.model = self.training.model.to(self.dtype)
        self.optimizer = self.training.optimizer(self.model.parameters())
        self.loss_of = self.training.loss

    def step(self, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> None:
        """What a user's loop does with one batch."""
        self.optimizer.zero_grad()
        inputs, targets = tree_map(self._cast, (inputs, targets))
        with _mixed(self.precision):
            output = self.model(*inputs)
            loss = output if self.loss_of is None else self.loss_of(output, *targets)
        loss.backward()
        self.optimizer.step()

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def loop_of(case: Case, precision: Precision) -> Loop:
    """A fresh loop, the same each time."""
    torch.manual_seed(SEED)
    return Loop(case.train(), precision)


def run(case: Case, precision: Precision, *, watched: bool = True, **options: Any) -> tuple[Finding, Guardian]:
    """Train until Guardian halts it. Raises AssertionError if it does not.

    With `watched` False, Guardian is not told of the loss function; `options` are Guardian's.
    """
    loop = loop_of(case, precision)
    guardian = Guardian(loop.model, loop.optimizer, sinks=[], **options)
    if watched and loop.loss_of is not None:
        loop.loss_of = guardian.watch_loss(loop.loss_of)
    try:
        with guardian, loop.training.around():
            for inputs, targets in loop.training.batches:
                loop.step(inputs, targets)
    except GuardError as error:
        return error.finding, guardian
    raise AssertionError(f"{case.name} in {precision} was not halted")


@contextmanager
def filled_memory() -> Iterator[None]:
    """What torch.empty returns is NaN, as it may be by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _mixed(precision: Precision) -> AbstractContextManager[Any]:
    if not precision.startswith("amp"):
        return nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, precision.removeprefix("amp-")))
