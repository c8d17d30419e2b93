"""Open a bundle that a run left: everything in it is checked and read as data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from gpt_guard.blackbox.files import read_json, read_manifest, read_tensors, refuse, validated
from gpt_guard.blackbox.manifest import FileName, Manifest
from gpt_guard.blackbox.recipe_file import StoredRecipe, dtype_named
from gpt_guard.blackbox.source import Source
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Finding

_TEXTS = TypeAdapter(dict[str, str])
_MODES = TypeAdapter(dict[str, bool])


@dataclass(frozen=True)
class Bundle:
    """A bundle as it lies in a folder: what is text has been read, tensors are read when they are asked for."""

    path: Path
    manifest: Manifest
    finding: Finding
    recipe: StoredRecipe
    source: Source
    environment: dict[str, str]
    modes: dict[str, bool]

    def has(self, name: FileName) -> bool:
        """Whether a file is in the bundle."""
        return name in self.manifest.files

    def why_absent(self, name: FileName) -> str | None:
        """Why a file was left out, as the bundle says it; None where it does not."""
        return next((str(each) for each in self.manifest.left_out if each.what.startswith(name)), None)

    def recipe_tensors(self) -> dict[FileName, dict[str, Any]]:
        """The tensors that a recipe needs, by file name, all on the CPU. Raises GuardUsageError."""
        found = {
            name: read_tensors(self.path, name, self.manifest)
            for name in (FileName.RNG, FileName.BATCH, FileName.LOSS, FileName.GRADIENTS)
            if self.has(name)
        }
        _check_recipe(self.path, found)
        return found

    def weights(self) -> dict[str, Any]:
        """Parameters and buffers, on the CPU. Raises GuardUsageError."""
        found = read_tensors(self.path, FileName.MODEL, self.manifest)
        saved, transient, frozen = (found.get(key) for key in ("model_state_dict", "transient", "frozen"))
        named = all(isinstance(group, dict) and _named_tensors(group) for group in (saved, transient))
        if not named or not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
            refuse(self.path / FileName.MODEL, "does not hold weights by name", "no bundle has such a file")
        # What has no plain form, such as a shard, was left out as None.
        return {"frozen": frozen, "model_state_dict": _there(saved), "transient": _there(transient)}

    def optimizer_states(self) -> list[dict[str, Any]]:
        """The `state_dict` of each optimizer, on the CPU. Raises GuardUsageError."""
        states = read_tensors(self.path, FileName.OPTIMIZER, self.manifest).get("optimizers")
        if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
            refuse(self.path / FileName.OPTIMIZER, "holds no list of optimizer states", "no bundle has such a file")
        return states


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open the folder `crash-step-...` that a run left in its `run_dir`.

    The manifest is read first; every file that it lists must be a regular file of the size and SHA-256 it gives.
    Nothing is executed, whatever the files hold. Raises GuardUsageError, naming the file and the remedy, for a folder
    that is no bundle, is damaged or incomplete, or has another schema.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise GuardUsageError(f"bundle is {path!r:.60}; give the path of a folder crash-step-... in a run_dir")
    folder = Path(path)
    manifest = read_manifest(folder)

    def content(name: FileName) -> Any:
        return read_json(folder, name, manifest)

    recipe = validated(StoredRecipe, content(FileName.RECIPE), folder / FileName.RECIPE)
    _check_dtypes(recipe, folder / FileName.RECIPE)
    return Bundle(
        path=folder,
        manifest=manifest,
        finding=validated(Finding, content(FileName.FINDING), folder / FileName.FINDING),
        recipe=recipe,
        source=validated(Source, content(FileName.SOURCE), folder / FileName.SOURCE),
        environment=_table(_TEXTS, content(FileName.ENVIRONMENT), folder / FileName.ENVIRONMENT),
        modes=_table(_MODES, content(FileName.MODES), folder / FileName.MODES),
    )


def _table(kind: TypeAdapter[dict[str, Any]], content: Any, file: Path) -> dict[str, Any]:
    try:
        return kind.validate_python(content, strict=True)
    except ValidationError:
        refuse(file, "is no table of names", "no bundle has such a file")


def _check_dtypes(recipe: StoredRecipe, file: Path) -> None:
    ambients = [recipe.ambient, recipe.loss.ambient if recipe.loss is not None else None]
    for ambient in filter(None, ambients):
        for _, name in ambient.autocast.values():
            try:
                dtype_named(name)
            except ValueError as error:
                refuse(file, f"is damaged: {error}", "copy the whole folder again from where it was written")


def _check_recipe(folder: Path, found: Mapping[FileName, Mapping[str, Any]]) -> None:
    """The containers are those that a recipe is made of; what lies in them is for the model to judge."""
    for name, args, kwargs in ((FileName.BATCH, "args", "kwargs"), (FileName.LOSS, "loss_args", "loss_kwargs")):
        content = found.get(name)
        if content is not None:
            given = content.get(kwargs)
            named = isinstance(given, dict) and all(isinstance(key, str) for key in given)
            if not named or not isinstance(content.get(args), (list, tuple)):
                refuse(folder / name, "does not hold arguments of a call", "no bundle has such a file")
    for group, states in found.get(FileName.RNG, {}).items():
        if not isinstance(states, dict) or not all(_is_state(state) for state in states.values()):
            refuse(folder / FileName.RNG, f"holds no generator states under {group!r:.40}", "no bundle has such a file")
    for group, gradients in found.get(FileName.GRADIENTS, {}).items():
        if not isinstance(gradients, dict) or not _named_tensors(gradients):
            refuse(folder / FileName.GRADIENTS, f"holds no gradients under {group!r:.40}", "no bundle has such a file")


def _named_tensors(group: Mapping[Any, Any]) -> bool:
    """Names to tensors; what no plain tensor stands for was left out as None."""
    return all(isinstance(name, str) and (value is None or isinstance(value, Tensor)) for name, value in group.items())


def _there(group: Any) -> dict[str, Tensor]:
    return {name: value for name, value in group.items() if value is not None}


def _is_state(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype is torch.uint8 and state.dim() == 1
