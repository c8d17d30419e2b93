"""Read the files of a bundle that may come from anywhere: as data, of the recorded size and digest, never executed."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from torch import Tensor

from gpt_guard.blackbox.manifest import BUNDLE_SCHEMA, MANIFEST, FileName, Manifest, StoredFile
from gpt_guard.blackbox.plain import tensors_in
from gpt_guard.checkpoint.fingerprint import file_digest
from gpt_guard.checkpoint.read import memory_size, read_payload
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.records.render import printable, some

MAX_JSON_BYTES = 64 * 2**20
"""The report of a run has some tens of kilobytes; far above, it is none."""

_AGAIN = "copy the whole folder again from where it was written"
_FAMILY, _, _VERSION = BUNDLE_SCHEMA.rpartition("/")

R = TypeVar("R", bound=BaseModel)


def read_manifest(folder: Path) -> Manifest:
    """The list of files of a bundle. Raises GuardUsageError for a folder that is none, or one of another version."""
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        refuse(folder, f"is {kind}", "give the folder crash-step-... that a run left in its run_dir")
    if not (folder / MANIFEST).exists():
        bundles = sorted(item.parent.name for item in folder.glob(f"crash-step-*/{MANIFEST}"))
        what = f"holds the bundles {some(bundles)}" if bundles else f"is no bundle: it has no {MANIFEST}"
        refuse(folder, what, "give one of them" if bundles else "give the folder crash-step-... of a run")
    content = _json(folder / MANIFEST)
    schema = content.get("schema_version") if isinstance(content, dict) else None
    family, _, version = str(schema).rpartition("/")
    if family != _FAMILY or not version.isdecimal():
        refuse(folder / MANIFEST, f"has the schema {printable(repr(schema), 60)}, not {BUNDLE_SCHEMA!r}", "no bundle")
    if version != _VERSION:
        what = f"was written with schema {printable(schema)!r}; this gpt_guard reads {BUNDLE_SCHEMA!r}"
        refuse(folder / MANIFEST, what, "read it with the gpt_guard that wrote it, or a newer one")
    return validated(Manifest, content, folder / MANIFEST)


def checked_file(folder: Path, name: FileName, manifest: Manifest) -> Path:
    """The path of a file that is there, regular, and as it was written. Raises GuardUsageError."""
    entry = manifest.files.get(name)
    file = folder / name
    if entry is None:
        why = next((each.why for each in manifest.left_out if each.what.startswith(name)), "the manifest has no such")
        refuse(file, f"was left out ({printable(why, 200)})", "give what it held by yourself")
    _check(file, entry)
    return file


def _check(file: Path, entry: StoredFile) -> None:
    try:
        status = file.lstat()
    except OSError as error:
        refuse(file, f"is missing ({error.strerror})", _AGAIN)
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        refuse(file, f"is {kind}; a bundle holds plain files only", "do not open it, unless you know who made it")
    if status.st_size != entry.size:
        how = "cut short" if status.st_size < entry.size else "changed"
        refuse(file, f"has {status.st_size} bytes, {entry.size} were written: it was {how}", _AGAIN)
    try:
        digest = file_digest(file)
    except GuardUsageError as error:
        refuse(file, printable(error, 200), "check its permissions")
    if digest != entry.sha256:
        refuse(file, "is not what was written: its SHA-256 differs from the manifest's", _AGAIN)


def read_json(folder: Path, name: FileName, manifest: Manifest) -> Any:
    """A JSON file of the bundle. Raises GuardUsageError."""
    return _json(checked_file(folder, name, manifest))


def _json(file: Path) -> Any:
    try:
        if file.is_symlink() or not file.is_file():
            refuse(file, "is no regular file", "a bundle holds plain files only")
        if file.stat().st_size > MAX_JSON_BYTES:
            refuse(file, f"is larger than {MAX_JSON_BYTES} bytes", "no bundle has such a file")
        return from_json(file.read_bytes())
    except OSError as error:
        refuse(file, f"cannot be read ({error.strerror})", "check its permissions")
    except ValueError as error:
        if isinstance(error, GuardUsageError):
            raise
        refuse(file, f"is no JSON: {printable(error)}", _AGAIN)


def validated(kind: type[R], content: Any, file: Path) -> R:
    """The record that a JSON value stands for. Raises GuardUsageError, naming the first field that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = printable(".".join(map(str, first["loc"])), 120)
        refuse(file, f"is damaged: {place}: {printable(first['msg'], 200)}", _AGAIN)


def read_tensors(folder: Path, name: FileName, manifest: Manifest) -> dict[str, Any]:
    """A file of tensors as a dict, all of them on the CPU; nothing in it is executed. Raises GuardUsageError."""
    file = checked_file(folder, name, manifest)
    try:
        content = read_payload(file, Reporter(lambda finding: None), None)
    except CheckpointError as error:
        refuse(file, f"cannot be used: {printable(error.finding.seen, 400)}", "do not read it by other means")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        refuse(file, "holds no dict of names", "no bundle has such a file")
    _check_sizes(file, content)
    return content


def _check_sizes(file: Path, content: Any) -> None:
    """A tensor of stride 0 takes no room in a file, and all of the memory once it is copied."""
    limit, total = memory_size(), 0
    try:
        for tensor in tensors_in(content):
            if type(tensor) is not Tensor or tensor.is_meta:
                refuse(file, f"holds a {type(tensor).__name__} on {tensor.device}", "a bundle holds plain tensors only")
            total += tensor.numel() * tensor.element_size()
    except RecursionError:
        refuse(file, "is nested without end", "no bundle has such a file")
    if limit is not None and total > limit:
        refuse(file, f"claims tensors of {total} bytes; this machine has {limit}", "use a machine with more memory")


def refuse(file: Path, what: str, remedy: str) -> NoReturn:
    """Raise GuardUsageError for a file of a bundle: what is wrong with it, and what to do."""
    raise GuardUsageError(f"{file}: {what}; {remedy}")
