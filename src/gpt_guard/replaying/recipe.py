"""A step that can be run again, the tensor in it that must go bad again, and what running it has shown.

The step may come from a loop that is still running or from a file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gpt_guard.hooks.capture.execution_context import ExecutionContext
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Finding, Moment, OperationSeen

_OF = re.compile(r"(?P<kind>input|output)(?P<position>.*?) of (?P<module>the model|\S+)$")
# The key of the cause that is told where no other fits.
_UNKNOWN = "own_formula"


@dataclass(frozen=True)
class LossRecipe:
    """The call of a loss function outside of the model, with the very tensors it was given.

    `gradients` are those that reached what it returned, by position in it ("" for a tensor alone); `calls_model` tells
    that the forward is part of it, and is run by it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: ExecutionContext
    gradients: dict[str, Tensor] = field(default_factory=dict)
    calls_model: bool = False

    def named(self) -> dict[str, Tensor]:
        """The tensors it was given that nothing computes, such as labels, by the names of its parameters.

        Empty where none has a history: what the model returned cannot be told from labels then.
        """
        function = getattr(self.function, "forward", self.function)
        try:
            bound: dict[str, Any] = inspect.signature(function).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            # A function without a signature, such as one written in C.
            bound = {**{f"argument {place}": each for place, each in enumerate(self.args, start=1)}, **self.kwargs}
        called = getattr(self.function, "__name__", type(self.function).__name__)
        found = {
            f"`{name}{position}` of {called}": tensor
            for name, value in bound.items()
            for position, tensor in walk(value)
        }
        labels = {name: tensor for name, tensor in found.items() if not tensor.requires_grad}
        return labels if len(labels) < len(found) else {}


@dataclass(frozen=True)
class Recipe:
    """What one forward, and the backward after it, were made of.

    - `args`, `kwargs`: what the model was called with.
    - `context`: generators' states by device, modes in the order of `model.modules()`, autocast, grad mode.
    - `reached`: positions of the outputs that the loss is computed from, where that is known.
    - `gradients`: those that reached the model's outputs from outside, by position in what it returned ("[1]" for
      the second of a tuple, ".loss", "" for a tensor alone); empty if no backward is part of the failure.
    - `also`: gradients of outputs that lie behind those and that the loss is computed from besides: not to be added.
    - `finding`: what was found, as a guard said it; None for a step that has not failed.
    - `loss`: the loss function outside of the model, where Guardian was told of it; never in a file.
    - `inside`: the forward was still running, so that it was the model itself which called `backward()`.
    - `alone`: the loop calls parts or methods of the model, so that there is nothing to be run but the loss function.
    - `notes`: what is known to differ by now, each as a sentence: a batch or parameters that were written to since.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: ExecutionContext
    reached: tuple[str, ...] = ()
    gradients: dict[str, Tensor] = field(default_factory=dict)
    also: dict[str, Tensor] = field(default_factory=dict)
    finding: Finding | None = None
    loss: LossRecipe | None = None
    notes: tuple[str, ...] = ()
    step: int = 0
    micro_batch: int = 0
    evaluation: bool = False
    inside: bool = False
    alone: bool = False


class TargetTensor(NamedTuple):
    """What must go bad again: an output or an input of a module, the loss, or the gradient of a parameter.

    `module` is a path, "" for the model itself; `position` is where in the output, or among the arguments, it sat.
    """

    kind: Literal["output", "input", "loss", "gradient"]
    module: str = ""
    position: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        owner = f"`{self.module}`" if self.module else "the model"
        if self.kind == "gradient":
            return f"the gradient of `{self.parameter}`"
        return "the loss" if self.kind == "loss" else f"{self.kind}{self.position} of {owner}"

    @property
    def where(self) -> str:
        """The same as the `position` of a finding that names another module."""
        return f"{self.kind}{self.position} of {self.module or 'the model'}"


def target_of(finding: Finding) -> TargetTensor | None:
    """The tensor that a finding is about; None if no forward or backward of the model has made it.

    A batch that was bad from the start and parameters that a step has poisoned have nothing to be run again.
    """
    if finding.code == "GG104" and finding.parameter is not None:
        made = finding.moment in (None, Moment.AFTER_BACKWARD)
        return TargetTensor("gradient", finding.module or "", parameter=finding.parameter) if made else None
    if finding.code not in ("GG101", "GG102"):
        return None
    position = finding.position or ""
    if (named := _OF.match(position)) is not None:
        path = "" if named["module"] == "the model" else named["module"]
        return TargetTensor("input" if named["kind"] == "input" else "output", path, named["position"])
    if position.startswith("output"):
        return TargetTensor("output", finding.module or "", position.removeprefix("output"))
    return TargetTensor("loss") if finding.code == "GG102" else None


@dataclass(frozen=True, repr=False)
class ReplayOutcome:
    """`reproduced` is True only where the very tensor of the finding went bad again.

    `operation` is what made it so, None where no operation could be proven; `text` says in sentences what was compared
    and, where it was not reproduced, what may differ and what to switch on. `seconds` is how long it took. `decided` is
    False where the replay came to no answer: it was stopped, could not run, or the fault lies in unknown code.
    """

    reproduced: bool
    text: str
    operation: OperationSeen | None = None
    finding: Finding | None = None
    seconds: float = 0.0
    decided: bool = True

    def __repr__(self) -> str:
        # What a notebook shows.
        return str(self)

    def __str__(self) -> str:
        operation = self.operation
        if operation is None:
            return self.text
        causes = "".join(f"\n  {cause.text}" for cause in operation.causes[:2])
        return f"{self.text}\n{operation.name}{location(operation)}\n{operation.shows}{causes}"


def location(operation: OperationSeen) -> str:
    """The module and line of an operation, as the end of a sentence: " in `layer` at train.py:3"."""
    module = f" in `{operation.module}`" if operation.module else ""
    return module + (f" at {operation.where}" if operation.where is not None else "")


def with_outcome(finding: Finding, outcome: ReplayOutcome) -> Finding:
    """The finding with what its replay has shown.

    Place, line and causes are those of the operation where the same tensor was reproduced, and as the guard said them
    otherwise: a place is never guessed.
    """
    operation = outcome.operation
    if operation is None or not outcome.reproduced:
        return finding.model_copy(update={"replay": outcome.text})
    changes: dict[str, object] = {"replay": outcome.text, "operation": operation}
    if operation.where is not None:
        changes["where"] = operation.where
    # Where none of the known causes fits the operation, what the guard has seen says more.
    if operation.causes and operation.cause != _UNKNOWN:
        first = operation.causes[0]
        changes |= {
            "causes": tuple(dict.fromkeys([*(cause.text for cause in operation.causes), *finding.causes])),
            "next_test": first.test or finding.next_test,
            "fix": first.fix or finding.fix,
        }
    if _more_exact(finding, operation):
        changes |= {"module": operation.module, "module_class": operation.module_class}
        whose = f"`{operation.module}`" if operation.module else "the model itself"
        changes["origin"] = f"The replay shows that {whose} made it; it was first noticed in the tensor named above."
        if (target := target_of(finding)) is not None and target.kind != "loss":
            changes["position"] = target.where
    return finding.model_copy(update=changes)


def _more_exact(finding: Finding, operation: OperationSeen) -> bool:
    """Whether the operation knows better in which module it stands.

    For a gradient, `module` is that of the parameter, and stays so.
    """
    if operation.module is None or finding.code == "GG104":
        return False
    # The wrapper of torch.compile and what is in it are one module to a person.
    return operation.module.removesuffix("_orig_mod").removesuffix(".") != finding.module
