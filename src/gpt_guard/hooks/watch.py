"""Watch: what a guard may look at while a Guardian is active."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.hooks.autograd_graph.nodes import uses_any
from gpt_guard.hooks.capture.capture import NoCapture
from gpt_guard.hooks.functions.call_record import CallRecord
from gpt_guard.hooks.gradients import GradNorms
from gpt_guard.hooks.inspection import Inspection
from gpt_guard.hooks.ledger import Ledger
from gpt_guard.hooks.modes import ModeLog
from gpt_guard.hooks.module_hooks import ModuleHooks
from gpt_guard.hooks.tensors import is_sharded
from gpt_guard.hooks.weights import ParameterVersions
from gpt_guard.records import Finding, SourceLine


class _Group(NamedTuple):
    """A parameter group as it was: its list, how many tensors that held, and the last of them."""

    tensors: Sequence[Tensor]
    size: int
    last: Tensor | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Group:
        return cls(tensors, len(tensors), tensors[-1] if tensors else None)


class Watch:
    """The model, the optimizers, the names of their parameters, and where the loop is now.

    `step` counts optimizer steps from 0 and names the one being prepared; `micro_batch` counts the backward calls for
    it, as of the last of them, `since_step` those since any step was begun or left out, `forwards` the training
    forwards since the last backward. `immediate` tells whether reading a value is free here
    (CPU); otherwise values go through `ledger`. `loss` is what a backward was called on, in `after_backward` only, and
    `backward_line` where, if that line has been left since; `grad_norms` are those of the last that reached the model.
    `evaluating` is True inside of `guardian.evaluating()`, `evaluation` in every forward without gradients. `scaling`
    is True while a GradScaler's scale is on the gradients, `closure` while a step evaluates a closure;
    `underflow` once gradients were seen to vanish in float16. `versions` tells
    who wrote to the parameters. `inspection` tells whether this step is inspected, and of the calls in it; `calls` has
    what they show. `forward_begins` are called at each forward of the model, `forward_ended` when it returns,
    `groups_changed` when the optimizers were found to hold other tensors (`renew`), with the table made anew. `logged`
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
        self.underflow = False
        self.loss: Tensor | None = None
        self.backward_line: SourceLine | None = None
        self.grad_norms: GradNorms | None = None
        self.logged: dict[str, float] = {}
        self.times_logged: dict[str, int] = {}
        self.modes_meant: set[str] = set()
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.extra: dict[str, Tensor]
        self.versions = ParameterVersions(self.parameters)
        self.forward_begins: list[Callable[[], None]] = []
        self.forward_ended: list[Callable[[Any], None]] = []
        self.groups_changed: list[Callable[[], None]] = []
        self.exchanged: set[str] = set()
        # The graph of a loss then ends in other tensors than the parameters: what a wrapper has gathered for a while.
        self.sharded = any(map(is_sharded, self.parameters.values()))
        self._name_all()

    def _name_all(self) -> None:
        self.extra = {}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._held = [self._name_groups(index, optimizer) for index, optimizer in enumerate(self.optimizers)]
        self._groups = [[_Group.of(group["params"]) for group in each.param_groups] for each in self.optimizers]

    def regrouped(self) -> bool:
        """Whether the optimizers may hold other tensors than the table has: by their lists, lengths and last tensors.

        Runs before each backward and step. All tensors are compared only in an inspected step.
        """
        for optimizer, known in zip(self.optimizers, self._groups, strict=True):
            groups = optimizer.param_groups
            if len(groups) != len(known):
                return True
            for group, (tensors, count, last) in zip(groups, known, strict=True):
                now = group["params"]
                if now is not tensors or len(now) != count or (count and now[-1] is not last):
                    return True
        return self.inspection.active and self._tensors_changed()

    def _tensors_changed(self) -> bool:
        return any(
            {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
            != set(map(id, held.values()))
            for optimizer, held in zip(self.optimizers, self._held, strict=True)
        )

    def renew(self) -> bool:
        """Make the table of parameters and their names anew, as on entry; False if the tensors are the same.

        `exchanged` names the model's parameters that are other tensors than on entry.
        """
        if not self._tensors_changed():
            self._groups = [[_Group.of(group["params"]) for group in each.param_groups] for each in self.optimizers]
            return False
        before, self.parameters = self.parameters, dict(self.model.named_parameters())
        self.exchanged |= {name for name, each in self.parameters.items() if before.get(name) is not each}
        self.versions.renew(self.parameters)
        self._name_all()
        return True

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

    def reaches(self, loss: Tensor) -> bool:
        """Whether a loss depends on parameters of the model or of an optimizer, by its graph; reads no values.

        Where they are sharded the graph does not say, and a loss that comes after a forward of the model counts.
        """
        if self.sharded:
            return loss.grad_fn is not None and self.forwards > 0
        return uses_any(loss, self.tracked.values())

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
