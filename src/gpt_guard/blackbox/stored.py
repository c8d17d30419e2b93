"""What a bundle holds: its manifest, and the recipe of the step as a record beside files of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint import plain_name, unwrap
from gpt_guard.hooks.capture.execution_context import ExecutionContext
from gpt_guard.records import Finding, Record
from gpt_guard.replaying.recipe import LossRecipe, Recipe

BUNDLE_SCHEMA: Literal["gpt_guard.bundle/1"] = "gpt_guard.bundle/1"

MANIFEST = "manifest.json"

_THE_MODEL = {"gpt_guard": "the model"}
"""Stands for the model itself among the arguments of a loss function."""

# What a recipe and its record have alike.
_SHARED = ("step", "micro_batch", "evaluation", "reached", "notes", "inside", "alone", "finding")
_INPUT = re.compile(r"(?P<what>input.* of )(?P<module>\S+)$")


class FileName(StrEnum):
    """All names that a bundle can have: a manifest that names any other, such as one with a path in it, is refused."""

    FINDING = "finding.json"
    REPORT = "report.json"
    STEPS = "steps.jsonl"
    ENVIRONMENT = "environment.json"
    SOURCE = "source.json"
    RECIPE = "recipe.json"
    MODES = "modes.json"
    BATCH = "batch.pt"
    RNG = "rng.pt"
    LOSS = "loss.pt"
    GRADIENTS = "output_gradients.pt"
    MODEL = "model.pt"
    OPTIMIZER = "optimizer.pt"


class StoredFile(Record):
    """One file of a bundle: size in bytes, SHA-256 in hex."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class LeftOut(Record):
    """Something that a bundle does not hold, and why."""

    what: str = Field(max_length=1000)
    why: str = Field(max_length=1000)

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Manifest(Record):
    """The list of a bundle's files, written last: `step` and `code` are those of the finding.

    `holes` are paths in the batch at which something stood that is no plain data; `devices` says where tensors of the
    batch lay that were not on the CPU.
    """

    schema_version: Literal["gpt_guard.bundle/1"] = BUNDLE_SCHEMA
    gpt_guard: str = Field(max_length=100)
    written: str = Field(max_length=100)
    step: int | None = None
    code: str = Field(max_length=100)
    files: dict[FileName, StoredFile]
    left_out: Annotated[tuple[LeftOut, ...], Field(max_length=10_000)] = ()
    holes: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()
    devices: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Tensors that go into one file, under names; `what` is what a person calls them."""

    name: FileName
    what: str
    value: Mapping[str, Any]


class StoredContext(Record):
    """Autocast by device type (whether it was enabled, and its dtype), grad mode and inference mode."""

    autocast: dict[str, tuple[bool, str]] = Field(default_factory=dict)
    grad: bool = True
    inference: bool = False


class StoredLoss(Record):
    """A call of a loss function outside of the model; `function` is its name, for a person to read."""

    function: str
    calls_model: bool
    ambient: StoredContext


class StoredRecipe(Record):
    """What of a recipe is no tensor; `finding` is as the guard said it, before anything was run again.

    `ambient` is the context of the forward, None where none had been captured: then there is nothing to run again.
    """

    step: int = 0
    micro_batch: int = 0
    evaluation: bool = False
    reached: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inside: bool = False
    alone: bool = False
    finding: Finding | None = None
    ambient: StoredContext | None = None
    loss: StoredLoss | None = None


def stored(recipe: Recipe | None) -> StoredRecipe:
    """The record of a recipe."""
    if recipe is None:
        return StoredRecipe()
    loss = None
    if recipe.loss is not None:
        loss = StoredLoss(
            function=function_name(recipe.loss.function),
            calls_model=recipe.loss.calls_model,
            ambient=_stored_context(recipe.loss.context),
        )
    return StoredRecipe(**_shared(recipe), ambient=_stored_context(recipe.context), loss=loss)


def _shared(recipe: Recipe | StoredRecipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in _SHARED}


def _stored_context(context: ExecutionContext) -> StoredContext:
    autocast = {kind: (on, dtype_name(dtype)) for kind, (on, dtype) in context.autocast.items()}
    return StoredContext(autocast=autocast, grad=context.grad, inference=context.inference)


def function_name(function: Any) -> str:
    """`module:name` of a function or method; of an object that is called, that of its class."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', 'a function')}"


def modes_of(model: nn.Module, recipe: Recipe) -> dict[str, bool]:
    """The mode of each module by its path in the plain model; empty where the model has other modules by now."""
    modules = list(model.modules())
    if len(modules) != len(recipe.context.training):
        return {}
    paths = {id(module): path for path, module in unwrap(model).named_modules()}
    modes = zip(modules, recipe.context.training, strict=True)
    return {plain_path(paths[id(module)]): mode for module, mode in modes if id(module) in paths}


def parts_of(recipe: Recipe, model: nn.Module) -> list[Part]:
    """The tensors of a recipe, in order of importance; a loss function that was given the model gets it again."""
    random = {"forward": recipe.context.random}
    gradients = {"outputs": recipe.gradients}
    parts = [Part(FileName.BATCH, "what the model was called with", {"args": recipe.args, "kwargs": recipe.kwargs})]
    if (loss := recipe.loss) is not None:
        random["loss"], gradients["loss"] = loss.context.random, loss.gradients
        what = "what the loss function was called with"
        own = {id(model), id(unwrap(model))}
        # A method of the model is called on the model that is built anew.
        owner = getattr(loss.function, "__self__", None)
        given = loss.args if owner is None or id(owner) not in own else (owner, *loss.args)
        args = tuple(_THE_MODEL if id(value) in own else value for value in given)
        kwargs = {name: _THE_MODEL if id(value) in own else value for name, value in loss.kwargs.items()}
        parts.append(Part(FileName.LOSS, what, {"loss_args": args, "loss_kwargs": kwargs}))
    if any(gradients.values()):
        parts.append(Part(FileName.GRADIENTS, "gradients that reached the outputs", gradients))
    return [Part(FileName.RNG, "states of the random generators", random), *parts]


def rebuilt(
    record: StoredRecipe,
    model: nn.Module,
    tensors: Mapping[FileName, Mapping[str, Any]],
    modes: Mapping[str, bool],
    loss_fn: Callable[..., Any] | None,
) -> Recipe:
    """The recipe again, for a model that may have been changed since; `tensors` are the parts by file name.

    Modules that are new since have the mode of the model as a whole.
    """
    assert record.ambient is not None
    whole = modes.get("", model.training)
    training = tuple(modes.get(plain_path(path), whole) for path, _ in model.named_modules())
    random, gradients = tensors.get(FileName.RNG, {}), tensors.get(FileName.GRADIENTS, {})
    loss = None
    given = tensors.get(FileName.LOSS)
    if record.loss is not None and loss_fn is not None and given is not None:
        loss = LossRecipe(
            function=loss_fn,
            args=tuple(model if _is_the_model(value) else value for value in given["loss_args"]),
            kwargs={name: model if _is_the_model(value) else value for name, value in given["loss_kwargs"].items()},
            context=_context(record.loss.ambient, random.get("loss", {}), training),
            gradients=dict(gradients.get("loss", {})),
            calls_model=record.loss.calls_model,
        )
    rest = _shared(record)
    rest["finding"] = None if record.finding is None else fitted(record.finding, model)
    return Recipe(
        **rest,
        args=tuple(tensors[FileName.BATCH]["args"]),
        kwargs=dict(tensors[FileName.BATCH]["kwargs"]),
        context=_context(record.ambient, random.get("forward", {}), training),
        gradients=dict(gradients.get("outputs", {})),
        loss=loss,
    )


def _context(record: StoredContext, random: Mapping[str, Tensor], training: tuple[bool, ...]) -> ExecutionContext:
    autocast = {kind: (on, dtype_named(name)) for kind, (on, name) in record.autocast.items()}
    return ExecutionContext(dict(random), training, autocast, record.grad, record.inference)


def _is_the_model(value: Any) -> bool:
    return isinstance(value, dict) and value == _THE_MODEL


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16". Raises ValueError for what is none: a file can say anything."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]!r} is no dtype")
    return found


def plain_path(path: str) -> str:
    """A module's path without the segments that `torch.compile`, DistributedDataParallel and their like put in."""
    return plain_name(f"{path}.").removesuffix(".")


def fitted(finding: Finding, model: nn.Module) -> Finding:
    """The finding with its paths as this model has them, so that a replay looks at the same module and parameter."""
    bare = unwrap(model)
    modules = {plain_path(path): path for path, _ in reversed(list(bare.named_modules()))}
    parameters = {plain_name(name): name for name, _ in bare.named_parameters(remove_duplicate=False)}
    changes: dict[str, str] = {}
    if finding.module is not None:
        changes["module"] = modules.get(plain_path(finding.module), finding.module)
    if finding.parameter is not None:
        changes["parameter"] = parameters.get(plain_name(finding.parameter), finding.parameter)
    if (received := _INPUT.match(finding.position or "")) is not None:
        path = modules.get(plain_path(received["module"]), received["module"])
        changes["position"] = f"{received['what']}{path}"
    return finding.model_copy(update=changes)
