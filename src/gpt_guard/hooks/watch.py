"""Watch: what a guard may look at while a Guardian is active."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.hooks.capture.capture import NoCapture
from gpt_guard.hooks.functions.call_record import CallRecord
from gpt_guard.hooks.gradients import GradNorms
from gpt_guard.hooks.inspection import Inspection
from gpt_guard.hooks.ledger import Ledger
from gpt_guard.hooks.modes import ModeLog
from gpt_guard.hooks.module_hooks import ModuleHooks
from gpt_guard.hooks.weights import ParameterVersions
from gpt_guard.records import Finding, SourceLine


class Watch:
    """The model, the optimizers, the names of their parameters, and where the loop is now.

    `step` counts optimizer steps from 0 and names the one being prepared; `micro_batch` counts the backward calls for
    it, as of the last of them, `since_step` those since any step was begun or left out, `forwards` the training
    forwards since the last backward. `immediate` tells whether reading a value is free here
    (CPU); otherwise values go through `ledger`. `loss` is what a backward was called on, in `after_backward` only, and
    `backward_line` where, if that line has been left since; `grad_norms` are those of the last that reached the model.
    `evaluating` is True inside of `guardian.evaluating()`, `evaluation` in every forward without gradients. `scaling`
    is True while a GradScaler's scale is on the gradients, `closure` while a step evaluates a closure. `versions` tells
    who wrote to the parameters. `inspection` tells whether this step is inspected, and of the calls in it; `calls` has
    what they show. `forward_begins` are called at each forward of the model, `forward_ended` when it returns. `logged`
    holds the newest numbers that the loop gave to `guardian.log()`.
    A shared parameter appears once, under its first name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        immediate: bool,
        tap: ModuleHooks,
        submit: Callable[[Finding], None],
        inspection: Inspection | None = None,
        scheduler: Any = None,
        run_dir: Path | None = None,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.scheduler = scheduler
        self.run_dir = run_dir
        self.immediate = immediate
        self.tap = tap
        self.inspection = Inspection(tap, steps=0) if inspection is None else inspection
        self.calls = CallRecord(model, lambda: (tap.calls, self.step, self.micro_batch))
        self.capture = NoCapture()
        self.modes = ModeLog(model)
        self.ledger = Ledger()
        self.submit = submit
        self.step = 0
        self.micro_batch = 0
        self.since_step = 0
        self.forwards = 0
        self.evaluation = False
        self.evaluating = False
        self.scaling = False
        self.closure = False
        self.loss: Tensor | None = None
        self.backward_line: SourceLine | None = None
        self.grad_norms: GradNorms | None = None
        self.logged: dict[str, float] = {}
        self.times_logged: dict[str, int] = {}
        self.modes_meant: set[str] = set()
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.extra: dict[str, Tensor] = {}
        self.versions = ParameterVersions(self.parameters)
        self.forward_begins: list[Callable[[], None]] = []
        self.forward_ended: list[Callable[[Any], None]] = []
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._held: list[dict[str, Tensor]] = []
        for index, optimizer in enumerate(self.optimizers):
            self._held.append(self._name_groups(index, optimizer))

    def _name_groups(self, index: int, optimizer: Optimizer) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for group, entries in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(entries["params"]):
                name = self._names.get(id(parameter))
                if name is None:
                    name = f"optimizer[{index}].param_groups[{group}][{place}]"
                    self.extra[name] = parameter
                    self._names[id(parameter)] = name
                held[name] = parameter
        return held

    def held_by(self, index: int) -> dict[str, Tensor]:
        """Parameters that optimizer `index` steps, by name; tensors that are not the model's under a made-up name."""
        return self._held[index]

    @property
    def tracked(self) -> dict[str, Tensor]:
        """The model's parameters and, after them, tensors that only an optimizer holds."""
        return {**self.parameters, **self.extra}

    def index_of(self, optimizer: Optimizer) -> int:
        """Which of the watched optimizers this is. Raises ValueError for a foreign one."""
        for index, own in enumerate(self.optimizers):
            if own is optimizer:
                return index
        raise ValueError(f"{type(optimizer).__name__} is not one of the optimizers given to Guardian")

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of a parameter of the model or of an optimizer, or None."""
        return self._names.get(id(tensor))

    def mode_is_meant(self, path: str) -> bool:
        """Whether a module's mode was declared to be deliberate, by a pattern in `modes_meant`."""
        return any(fnmatchcase(path, pattern) for pattern in self.modes_meant)

    def owner_of(self, parameter: str) -> tuple[str, str | None]:
        """Path and class name of the module that holds a parameter or buffer by this name."""
        path = parameter.rpartition(".")[0]
        try:
            return path, type(self.model.get_submodule(path)).__name__
        except AttributeError:
            return path, None

    def ran(self) -> set[str] | None:
        """Paths of the modules that returned since the model was last called; None if nobody watches their outputs."""
        return {self.tap.names[index] for index in self.tap.order} if self.tap.insides_watched else None
