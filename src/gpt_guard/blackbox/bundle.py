"""Open a bundle that may come from anywhere: of the recorded size and digest, read as data, never executed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from torch import Tensor

from gpt_guard.blackbox.source import Source
from gpt_guard.blackbox.stored import (
    BUNDLE_SCHEMA,
    MANIFEST,
    FileName,
    Manifest,
    StoredFile,
    StoredRecipe,
    dtype_named,
)
from gpt_guard.blackbox.write import tensors_in
from gpt_guard.checkpoint.fingerprint import file_digest
from gpt_guard.checkpoint.read import memory_size, read_payload
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.records import Finding
from gpt_guard.records.render import printable, some

_TEXTS = TypeAdapter(dict[str, str])
_MODES = TypeAdapter(dict[str, bool])

MAX_JSON_BYTES = 64 * 2**20
"""The report of a run has some tens of kilobytes; far above, it is none."""

_AGAIN = "copy the whole folder again from where it was written"
_FAMILY, _, _VERSION = BUNDLE_SCHEMA.rpartition("/")

R = TypeVar("R", bound=BaseModel)


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
            name: _read_tensors(self.path, name, self.manifest)
            for name in (FileName.RNG, FileName.BATCH, FileName.LOSS, FileName.GRADIENTS)
            if self.has(name)
        }
        _check_recipe(self.path, found)
        return found

    def weights(self) -> dict[str, Any]:
        """Parameters and buffers, on the CPU. Raises GuardUsageError."""
        found = _read_tensors(self.path, FileName.MODEL, self.manifest)
        saved, transient, frozen = (found.get(key) for key in ("model_state_dict", "transient", "frozen"))
        named = all(isinstance(group, dict) and _named_tensors(group) for group in (saved, transient))
        if not named or not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
            _refuse(self.path / FileName.MODEL, "does not hold weights by name")
        # What has no plain form, such as a shard, was left out as None.
        return {"frozen": frozen, "model_state_dict": _there(saved), "transient": _there(transient)}

    def optimizer_states(self) -> list[dict[str, Any]]:
        """The `state_dict` of each optimizer, on the CPU. Raises GuardUsageError."""
        states = _read_tensors(self.path, FileName.OPTIMIZER, self.manifest).get("optimizers")
        if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
            _refuse(self.path / FileName.OPTIMIZER, "holds no list of optimizer states")
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
    manifest = _read_manifest(folder)

    def content(name: FileName) -> Any:
        return _read_json(folder, name, manifest)

    recipe = _validated(StoredRecipe, content(FileName.RECIPE), folder / FileName.RECIPE)
    _check_dtypes(recipe, folder / FileName.RECIPE)
    return Bundle(
        path=folder,
        manifest=manifest,
        finding=_validated(Finding, content(FileName.FINDING), folder / FileName.FINDING),
        recipe=recipe,
        source=_validated(Source, content(FileName.SOURCE), folder / FileName.SOURCE),
        environment=_table(_TEXTS, content(FileName.ENVIRONMENT), folder / FileName.ENVIRONMENT),
        modes=_table(_MODES, content(FileName.MODES), folder / FileName.MODES),
    )


def _table(kind: TypeAdapter[dict[str, Any]], content: Any, file: Path) -> dict[str, Any]:
    try:
        return kind.validate_python(content, strict=True)
    except ValidationError:
        _refuse(file, "is no table of names")


def _check_dtypes(recipe: StoredRecipe, file: Path) -> None:
    contexts = [recipe.ambient, recipe.loss.ambient if recipe.loss is not None else None]
    for context in filter(None, contexts):
        for _, name in context.autocast.values():
            try:
                dtype_named(name)
            except ValueError as error:
                _refuse(file, f"is damaged: {error}", _AGAIN)


def _check_recipe(folder: Path, found: Mapping[FileName, Mapping[str, Any]]) -> None:
    """The containers are those that a recipe is made of; what lies in them is for the model to judge."""
    for name, args, kwargs in ((FileName.BATCH, "args", "kwargs"), (FileName.LOSS, "loss_args", "loss_kwargs")):
        content = found.get(name)
        if content is not None:
            given = content.get(kwargs)
            named = isinstance(given, dict) and all(isinstance(key, str) for key in given)
            if not named or not isinstance(content.get(args), (list, tuple)):
                _refuse(folder / name, "does not hold arguments of a call")
    for group, states in found.get(FileName.RNG, {}).items():
        if not isinstance(states, dict) or not all(_is_state(state) for state in states.values()):
            _refuse(folder / FileName.RNG, f"holds no generator states under {group!r:.40}")
    for group, gradients in found.get(FileName.GRADIENTS, {}).items():
        if not isinstance(gradients, dict) or not _named_tensors(gradients):
            _refuse(folder / FileName.GRADIENTS, f"holds no gradients under {group!r:.40}")


def _named_tensors(group: Mapping[Any, Any]) -> bool:
    """Names to tensors; what no plain tensor stands for was left out as None."""
    return all(isinstance(name, str) and (value is None or isinstance(value, Tensor)) for name, value in group.items())


def _there(group: Any) -> dict[str, Tensor]:
    return {name: value for name, value in group.items() if value is not None}


def _is_state(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype is torch.uint8 and state.dim() == 1


def _read_manifest(folder: Path) -> Manifest:
    """The list of files of a bundle. Raises GuardUsageError for a folder that is none, or one of another version."""
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        _refuse(folder, f"is {kind}", "give the folder crash-step-... that a run left in its run_dir")
    if not (folder / MANIFEST).exists():
        bundles = sorted(item.parent.name for item in folder.glob(f"crash-step-*/{MANIFEST}"))
        what = f"holds the bundles {some(bundles)}" if bundles else f"is no bundle: it has no {MANIFEST}"
        _refuse(folder, what, "give one of them" if bundles else "give the folder crash-step-... of a run")
    content = _json(folder / MANIFEST)
    schema = content.get("schema_version") if isinstance(content, dict) else None
    family, _, version = str(schema).rpartition("/")
    if family != _FAMILY or not version.isdecimal():
        _refuse(folder / MANIFEST, f"has the schema {printable(repr(schema), 60)}, not {BUNDLE_SCHEMA!r}", "no bundle")
    if version != _VERSION:
        what = f"was written with schema {printable(schema)!r}; this gpt_guard reads {BUNDLE_SCHEMA!r}"
        _refuse(folder / MANIFEST, what, "read it with the gpt_guard that wrote it, or a newer one")
    return _validated(Manifest, content, folder / MANIFEST)


def _checked_file(folder: Path, name: FileName, manifest: Manifest) -> Path:
    """The path of a file that is there, regular, and as it was written. Raises GuardUsageError."""
    entry = manifest.files.get(name)
    file = folder / name
    if entry is None:
        why = next((each.why for each in manifest.left_out if each.what.startswith(name)), "the manifest has no such")
        _refuse(file, f"was left out ({printable(why, 200)})", "give what it held by yourself")
    _check(file, entry)
    return file


def _check(file: Path, entry: StoredFile) -> None:
    try:
        status = file.lstat()
    except OSError as error:
        _refuse(file, f"is missing ({error.strerror})", _AGAIN)
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        _refuse(file, f"is {kind}; a bundle holds plain files only", "do not open it, unless you know who made it")
    if status.st_size != entry.size:
        how = "cut short" if status.st_size < entry.size else "changed"
        _refuse(file, f"has {status.st_size} bytes, {entry.size} were written: it was {how}", _AGAIN)
    try:
        digest = file_digest(file)
    except GuardUsageError as error:
        _refuse(file, printable(error, 200), "check its permissions")
    if digest != entry.sha256:
        _refuse(file, "is not what was written: its SHA-256 differs from the manifest's", _AGAIN)


def _read_json(folder: Path, name: FileName, manifest: Manifest) -> Any:
    """A JSON file of the bundle. Raises GuardUsageError."""
    return _json(_checked_file(folder, name, manifest))


def _json(file: Path) -> Any:
    try:
        if file.is_symlink() or not file.is_file():
            _refuse(file, "is no regular file", "a bundle holds plain files only")
        if file.stat().st_size > MAX_JSON_BYTES:
            _refuse(file, f"is larger than {MAX_JSON_BYTES} bytes")
        return from_json(file.read_bytes())
    except OSError as error:
        _refuse(file, f"cannot be read ({error.strerror})", "check its permissions")
    except ValueError as error:
        if isinstance(error, GuardUsageError):
            raise
        _refuse(file, f"is no JSON: {printable(error)}", _AGAIN)


def _validated(kind: type[R], content: Any, file: Path) -> R:
    """The record that a JSON value stands for. Raises GuardUsageError, naming the first field that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = printable(".".join(map(str, first["loc"])), 120)
        _refuse(file, f"is damaged: {place}: {printable(first['msg'], 200)}", _AGAIN)


def _read_tensors(folder: Path, name: FileName, manifest: Manifest) -> dict[str, Any]:
    """A file of tensors as a dict, all of them on the CPU; nothing in it is executed. Raises GuardUsageError."""
    file = _checked_file(folder, name, manifest)
    try:
        content = read_payload(file, Reporter(lambda finding: None), None)
    except CheckpointError as error:
        _refuse(file, f"cannot be used: {printable(error.finding.seen, 400)}", "do not read it by other means")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        _refuse(file, "holds no dict of names")
    _check_sizes(file, content)
    return content


def _check_sizes(file: Path, content: Any) -> None:
    """A tensor of stride 0 takes no room in a file, and all of the memory once it is copied."""
    limit, total = memory_size(), 0
    try:
        for tensor in tensors_in(content):
            if type(tensor) is not Tensor or tensor.is_meta:
                _refuse(
                    file, f"holds a {type(tensor).__name__} on {tensor.device}", "a bundle holds plain tensors only"
                )
            total += tensor.numel() * tensor.element_size()
    except RecursionError:
        _refuse(file, "is nested without end")
    if limit is not None and total > limit:
        _refuse(file, f"claims tensors of {total} bytes; this machine has {limit}", "use a machine with more memory")


def _refuse(file: Path, what: str, remedy: str = "no bundle has such a file") -> NoReturn:
    """Raise GuardUsageError for a file of a bundle: what is wrong with it, and what to do."""
    raise GuardUsageError(f"{file}: {what}; {remedy}")
