"""Write a bundle: a folder that is whole or absent, holds plain data only, and says what it does not hold."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from gpt_guard.blackbox.folder import whole_folder
from gpt_guard.blackbox.manifest import MANIFEST, FileName, LeftOut, Manifest, StoredFile
from gpt_guard.blackbox.plain import Plain, tensor_bytes
from gpt_guard.checkpoint.fingerprint import file_digest
from gpt_guard.checkpoint.read import unsafe_globals
from gpt_guard.records import Finding
from gpt_guard.records.render import some

MEGABYTE = 2**20


@dataclass(frozen=True)
class Part:
    """Tensors that go into one file, under names; `what` is what a person calls them."""

    name: FileName
    what: str
    value: Mapping[str, Any]


@dataclass
class _Written:
    files: dict[FileName, StoredFile] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    holes: list[str] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)


def write_bundle(
    path: Path,
    finding: Finding,
    texts: Mapping[FileName, bytes],
    parts: Sequence[Part],
    *,
    limit: float,
    absent: Sequence[LeftOut] = (),
) -> Manifest:
    """Write the folder `path` in one move. Tensors are copied to the CPU one file after the other.

    `parts` come in order of importance: from the first on that no longer fits into `limit` bytes, all are left out,
    and the manifest says so; so does it with `absent`. Raises OSError or RuntimeError (a full disk, as torch says it).
    """
    written = _Written(left_out=list(absent))
    with whole_folder(path) as folder:
        for name, text in texts.items():
            (folder / name).write_bytes(text)
            _note(folder / name, name, written)
        for part in _within(limit, parts, written):
            _save(folder / part.name, part, written)
        manifest = Manifest(
            gpt_guard=metadata.version("gpt-guard-torch"),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            step=finding.step,
            code=finding.code,
            files=written.files,
            left_out=tuple(written.left_out),
            holes=tuple(written.holes),
            devices=written.devices,
        )
        (folder / MANIFEST).write_bytes(as_json(manifest))
    return manifest


def as_json(content: Any) -> bytes:
    """A record or plain values as JSON; NaN and the infinities are strings, as in every file of gpt_guard."""
    return to_json(content, indent=1, inf_nan_mode="strings")


def _within(limit: float, parts: Sequence[Part], written: _Written) -> list[Part]:
    room, kept = limit, list(parts)
    for place, part in enumerate(parts):
        # Generators take 5 KB, and without them what is random in the step would be another step.
        room -= 0 if part.name is FileName.RNG else tensor_bytes(part.value)
        if room < 0:
            kept = list(parts[:place])
            break
    for part in parts[len(kept) :]:
        why = f"{_megabytes(tensor_bytes(part.value))} MB; with it the bundle is over {_megabytes(limit)} MB"
        written.left_out.append(LeftOut(what=f"{part.name} ({part.what})", why=f"{why} (bundle_limit_mb)"))
    return kept


def _save(file: Path, part: Part, written: _Written) -> None:
    plain = Plain()
    value = {key: plain.take(item, key) for key, item in part.value.items()}
    try:
        torch.save(value, file)
    except RuntimeError as error:  # how torch says that a write has failed, whatever the reason
        full = shutil.disk_usage(file.parent).free < tensor_bytes(value)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    if needs := unsafe_globals(file):
        file.unlink()
        why = f"it needs {some(needs)}, which only unpickling could bring back"
        written.left_out.append(LeftOut(what=f"{part.name} ({part.what})", why=why))
        return
    _note(file, part.name, written)
    written.left_out += plain.left_out
    if part.name in (FileName.BATCH, FileName.LOSS, FileName.GRADIENTS):  # weights go to where the model has them
        written.holes += plain.holes
        written.devices |= plain.devices


def _note(file: Path, name: FileName, written: _Written) -> None:
    written.files[name] = StoredFile(size=file.stat().st_size, sha256=file_digest(file))


def _megabytes(size: float) -> str:
    return f"{size / MEGABYTE:.3g}"
