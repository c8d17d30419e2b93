"""A recipe as a file: what is plain text in it as a record, what is tensors as parts of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from gpt_guard.blackbox.manifest import FileName
from gpt_guard.blackbox.paths import fitted, plain_path
from gpt_guard.blackbox.write import Part
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.hooks.capture.execution_context import Ambient
from gpt_guard.records import Finding, Record
from gpt_guard.replaying.recipe import LossRecipe, Recipe

_THE_MODEL = {"gpt_guard": "the model"}
"""Stands for the model itself among the arguments of a loss function."""


class StoredAmbient(Record):
    """Autocast by device type (whether it was enabled, and its dtype), grad mode and inference mode."""

    autocast: dict[str, tuple[bool, str]] = Field(default_factory=dict)
    grad: bool = True
    inference: bool = False


class StoredLoss(Record):
    """A call of a loss function outside of the model; `function` is its name, for a person to read."""

    function: str
    calls_model: bool
    ambient: StoredAmbient


class StoredRecipe(Record):
    """What of a recipe is no tensor; `finding` is as the guard said it, before anything was run again.

    `ambient` is None where no forward had been captured: then there is nothing to run again.
    """

    step: int = 0
    micro_batch: int = 0
    evaluation: bool = False
    reached: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inside: bool = False
    alone: bool = False
    finding: Finding | None = None
    ambient: StoredAmbient | None = None
    loss: StoredLoss | None = None


def stored(recipe: Recipe | None) -> StoredRecipe:
    """The record of a recipe."""
    if recipe is None:
        return StoredRecipe()
    loss = recipe.loss
    return StoredRecipe(
        step=recipe.step,
        micro_batch=recipe.micro_batch,
        evaluation=recipe.evaluation,
        reached=recipe.reached,
        notes=recipe.notes,
        inside=recipe.inside,
        alone=recipe.alone,
        finding=recipe.finding,
        ambient=_stored_ambient(recipe.ambient),
        loss=None if loss is None else _stored_loss(loss),
    )


def _stored_ambient(ambient: Ambient) -> StoredAmbient:
    autocast = {kind: (on, _dtype_name(dtype)) for kind, (on, dtype) in ambient.autocast.items()}
    return StoredAmbient(autocast=autocast, grad=ambient.grad, inference=ambient.inference)


def _stored_loss(loss: LossRecipe) -> StoredLoss:
    return StoredLoss(
        function=function_name(loss.function), calls_model=loss.calls_model, ambient=_stored_ambient(loss.ambient)
    )


def function_name(function: Any) -> str:
    """`module:name` of a function or method; of an object that is called, that of its class."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', 'a function')}"


def modes_of(model: nn.Module, recipe: Recipe) -> dict[str, bool]:
    """The mode of each module by its path in the plain model; empty where the model has other modules by now."""
    modules = list(model.modules())
    if len(modules) != len(recipe.ambient.training):
        return {}
    paths = {id(module): path for path, module in unwrap(model).named_modules()}
    modes = zip(modules, recipe.ambient.training, strict=True)
    return {plain_path(paths[id(module)]): mode for module, mode in modes if id(module) in paths}


def parts_of(recipe: Recipe, model: nn.Module) -> list[Part]:
    """The tensors of a recipe, in order of importance; a loss function that was given the model gets it again."""
    random = {"forward": recipe.ambient.random}
    gradients = {"outputs": recipe.gradients}
    parts = [Part(FileName.BATCH, "what the model was called with", {"args": recipe.args, "kwargs": recipe.kwargs})]
    if (loss := recipe.loss) is not None:
        random["loss"], gradients["loss"] = loss.ambient.random, loss.gradients
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
            ambient=_ambient(record.loss.ambient, random.get("loss", {}), training),
            gradients=dict(gradients.get("loss", {})),
            calls_model=record.loss.calls_model,
        )
    return Recipe(
        args=tuple(tensors[FileName.BATCH]["args"]),
        kwargs=dict(tensors[FileName.BATCH]["kwargs"]),
        ambient=_ambient(record.ambient, random.get("forward", {}), training),
        reached=record.reached,
        gradients=dict(gradients.get("outputs", {})),
        finding=None if record.finding is None else fitted(record.finding, model),
        loss=loss,
        notes=record.notes,
        step=record.step,
        micro_batch=record.micro_batch,
        evaluation=record.evaluation,
        inside=record.inside,
        alone=record.alone,
    )


def _ambient(record: StoredAmbient, random: Mapping[str, Tensor], training: tuple[bool, ...]) -> Ambient:
    autocast = {kind: (on, dtype_named(name)) for kind, (on, name) in record.autocast.items()}
    return Ambient(dict(random), training, autocast, record.grad, record.inference)


def _is_the_model(value: Any) -> bool:
    return isinstance(value, dict) and value == _THE_MODEL


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16". Raises ValueError for what is none: a file can say anything."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]!r} is no dtype")
    return found
