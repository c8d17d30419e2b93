"""Subject: what there is to check; Stage: one question about it, with what it needs; and the list of all stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checks.tokenizer.tokenizers import Tokenizer
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import CheckResult, Finding, Severity

T = TypeVar("T")
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Subject:
    """What is to be checked; whatever is None cannot be, and its stages say so.

    `make_model` builds a fresh, untrained model of the same class and configuration. `batches` gives one batch
    `(x, y)` after another, `[B, T]` each, and may be called repeatedly. `data` holds the 1-D token ids of each split.
    `payload` is a loaded checkpoint. `trained` tells that the model's weights come from training. `shifts_inside`
    tells that the model shifts the targets itself (Hugging Face's `labels`), so that y is x. `facts` collects what the
    report must carry. `progress` is told how far a long check is: done, of how many, and a figure. `sources` says in
    words where a value was derived from that nobody gave (`sources["batch"]`: cut from the data, so its shift is ours
    and proves nothing). `unusable` holds, by kind of file, why a file could not be read.
    """

    model: nn.Module | None = None
    make_model: Callable[[], nn.Module] | None = None
    config: Any = None
    batch: tuple[Tensor, Tensor] | None = None
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None = None
    data: dict[str, Tensor] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    optimizer: Optimizer | None = None
    loss_fn: LossFunction | None = None
    vocab_size: int | None = None
    block_size: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 42
    paths: dict[str, Path] = field(default_factory=dict)
    payload: Mapping[str, Any] | None = None
    trained: bool = False
    causal: bool = True
    shifts_inside: bool = False
    ignore_index: int = -100
    pad_id: int | None = None
    eos_id: int | None = None
    text: str | None = None
    overfit_steps: int = 300
    compare_dropout: bool = False
    progress: Callable[[int, int, str], None] = lambda done, total, figure: None
    facts: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unusable: dict[str, Finding] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Tensor, Tensor] | None:
        """The batch on the model's device; whether it lies there by itself is asked by the stage for batches.

        None where there is no batch, or one on the meta device, which has no values to move.
        """
        if self.batch is None or any(part.is_meta for part in self.batch):
            return None
        return self.batch[0].to(self.model_device), self.batch[1].to(self.model_device)

    @property
    def model_device(self) -> torch.device:
        """Where the model's first parameter is; the chosen device where it has none."""
        first = next(self.model.parameters(), None) if self.model is not None else None
        return self.device if first is None else first.device


def vocabulary(subject: Subject) -> int | None:
    """Number of ids that may be asked with: the vocabulary, else as many as the batch shows."""
    if subject.vocab_size is not None:
        return subject.vocab_size
    return int(subject.batch[0].max()) + 1 if subject.batch is not None and subject.batch[0].numel() else None


@dataclass(frozen=True)
class Need(Generic[T]):
    """What a stage cannot ask without: `find` takes it out of a subject, `words` say that it is not there.

    Called with a subject it gives the thing itself: `model = MODEL(subject)`.
    """

    find: Callable[[Subject], T | None]
    words: str | Callable[[Subject], str]

    def __call__(self, subject: Subject) -> T:
        """Raises ValueError with the words where it is not there; the runner asks `missing` first."""
        found = self.find(subject)
        if found is None:
            raise ValueError(self.missing(subject))
        return found

    def missing(self, subject: Subject) -> str | None:
        """Why the subject cannot be asked; None if it can."""
        if self.find(subject) is not None:
            return None
        return self.words if isinstance(self.words, str) else self.words(subject)


MODEL = Need[nn.Module](lambda subject: subject.model, "no model")
BATCH = Need[tuple[Tensor, Tensor]](lambda subject: subject.inputs, "no batch, and no data to cut one from")
VOCABULARY = Need[int](vocabulary, "neither a batch nor vocab_size tells which ids the model takes")


class Stage(ABC):
    """One stage of preflight: yields a CheckResult per line it prints.

    `name` is what `--only` and `--skip` take; `after` names stages without whose success this one says nothing new
    and is skipped; `needs` is what it cannot do without, the first that is not there being the reason why it is
    skipped. The runner restores all state around `run` and turns an exception in it into a failed result.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]
    after: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need[Any], ...]] = ()

    def missing(self, subject: Subject) -> str | None:
        """What this stage would need and does not have, in words; None if it can run."""
        return next((why for need in self.needs if (why := need.missing(subject)) is not None), None)

    @abstractmethod
    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """Ask; may read the device and train copies, must not change the subject's tensors for good."""

    def line(
        self,
        title: str,
        measured: Any,
        expected: Any = "",
        findings: Finding | Iterable[Finding | None] | None = (),
        *,
        fails: Severity = Severity.ERROR,
        **facts: Any,
    ) -> CheckResult:
        """A line: the measured figure next to the expected one, and what is to be said of it, None for nothing.

        A cross where a finding is an error, or as bad as `fails`; else a tick, and milder findings are its notes.
        """
        given = (findings,) if isinstance(findings, Finding) else findings or ()
        found = tuple(each for each in given if each is not None)
        crossed = tuple(Severity)[tuple(Severity).index(fails) :]
        return CheckResult(
            stage=self.name,
            title=title,
            status="failed" if any(each.severity in crossed for each in found) else "passed",
            measured=str(measured),
            expected=str(expected),
            facts=facts,
            findings=found,
        )

    def skipped(self, title: str, why: str) -> CheckResult:
        """A line that says what was not asked and why."""
        return CheckResult(stage=self.name, title=title, status="skipped", measured=why)


NAMES = (
    "environment",
    "files",
    "tokenizer",
    "token-ids",
    "batches",
    "shapes",
    "initial-loss",
    "causality",
    "gradients",
    "optimizer",
    "overfit",
    "validation",
    "checkpoint",
    "generation",
)
"""The names of all stages in the order in which data flows; a stage's number is its place in here, counted from 1."""


def stage(name: str) -> Stage:
    """The stage of a name such as "token-ids", loaded from its own folder when it is asked for.

    Raises ModuleNotFoundError for a name that does not exist.
    """
    home = import_module(f"gpt_guard.checks.{name.replace('-', '_')}.stage")
    kind: type[Stage] = getattr(home, f"{name.title().replace('-', '')}Stage")
    return kind()


def heading(name: str) -> str:
    """Number and title of a stage, as a report shows them; only the name for one that this version does not have."""
    return f"{stage(name).number:>2} {title(name)}" if name in NAMES else name


def title(name: str) -> str:
    """The title of a stage; its name for one that this version does not have."""
    return stage(name).title if name in NAMES else name


def select(only: Iterable[str | int] = (), skip: Iterable[str | int] = ()) -> tuple[Stage, ...]:
    """The stages to run: all, or those in `only`, without those in `skip`; each by name or number.

    Raises GuardUsageError for a stage that does not exist, listing those that do, and where none is left.
    """
    wanted, unwanted = set(map(_name, only)), set(map(_name, skip))
    chosen = tuple(stage(name) for name in NAMES if (not wanted or name in wanted) and name not in unwanted)
    if not chosen:
        raise GuardUsageError(f"no stage is left to run: {', '.join(sorted(unwanted))} left out")
    return chosen


def _name(asked: str | int) -> str:
    text = str(asked).strip().lower().replace("_", "-")
    if text.isdecimal() and 1 <= int(text) <= len(NAMES):
        return NAMES[int(text) - 1]
    if text not in NAMES:
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(NAMES, start=1))
        raise GuardUsageError(f"there is no stage {asked!r}; the stages are {listed}")
    return text
