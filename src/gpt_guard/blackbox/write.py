"""Write a bundle: a folder that is whole or absent, holds plain data only, and says what it does not hold."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json
from torch import Tensor, nn

from gpt_guard.blackbox.stored import MANIFEST, FileName, LeftOut, Manifest, Part, StoredFile
from gpt_guard.checkpoint.fingerprint import file_digest
from gpt_guard.checkpoint.read import unsafe_globals
from gpt_guard.records import Finding
from gpt_guard.records.atomic import sync_folder
from gpt_guard.records.render import printable, some

MEGABYTE = 2**20
MAX_DEPTH = 32
"""Nesting deeper than this is taken for a cycle."""

_AS_IT_IS = (type(None), str, bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)


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


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes its name when the block ends well; else nothing of it stays.

    All bytes are on the disk before the name changes, so that after a crash `path` is complete or absent. A process
    that is killed in between leaves a hidden folder `.gpt_guard-*.tmp`, which nothing reads. Raises OSError, also
    where `path` exists already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # secrets, since the random module's state belongs to the user's run.
    temporary = path.with_name(f".gpt_guard-{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        sync_folder(temporary)
        if path.exists():  # an empty folder of that name would be replaced without a word
            raise FileExistsError(f"{path} exists already")
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


class Plain:
    """Makes values plain; what has no plain form becomes None and is named in `left_out`, by its path.

    `devices` says where each tensor was that did not lie on the CPU. A tensor that comes twice stays one.
    """

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []
        self.holes: list[str] = []
        self.devices: dict[str, str] = {}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, value: Any, path: str, depth: int = 0) -> Any:
        """The value as plain data; reads the device where a tensor lies on one."""
        if depth > MAX_DEPTH:
            return self._leave_out(path, "nested too deep")
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, (bool, int, float, complex)):
            return _number(value)
        if type(value) in _AS_IT_IS:
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._sequence(value, path, depth)
        return self._leave_out(path, "not plain data; it would have to be pickled")

    def _leave_out(self, path: str, why: str) -> None:
        self.holes.append(path)
        self.left_out.append(LeftOut(what=printable(path, 300), why=why))

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        plain: dict[Any, Any] = OrderedDict() if type(value) is OrderedDict else {}
        if type(value) not in (dict, OrderedDict):
            self._note(path, value, "a dict")
        for key, item in value.items():
            if type(key) in (str, int, float, bool, type(None)):
                plain[key] = self.take(item, joined(path, key), depth + 1)
            else:
                self._leave_out(joined(path, key), f"its key is a {type(key).__qualname__}")
        return plain

    def _sequence(self, value: Any, path: str, depth: int) -> Any:
        items = [self.take(item, joined(path, place), depth + 1) for place, item in enumerate(value)]
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        kept = set if kind is frozenset else kind
        if type(value) is not kept:
            self._note(path, value, f"a {kept.__name__}")
        return kept(items)

    def _note(self, path: str, value: Any, kept: str) -> None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self.left_out.append(LeftOut(what=printable(f"{path}: the class {name}", 300), why=f"kept as {kept}"))

    def _tensor(self, tensor: Tensor, path: str) -> Tensor | None:
        if type(tensor) not in _TENSORS or tensor.is_meta or tensor.is_nested:
            self._leave_out(path, f"a tensor of the kind {type(tensor).__qualname__}, which has no plain form")
            return None
        if tensor.device.type != "cpu":
            self.devices[path] = str(tensor.device)
        if id(tensor) not in self._copies:
            # The original is kept too: its id must not be given to another tensor meanwhile.
            self._copies[id(tensor)] = (tensor, host_copy(tensor))
        return self._copies[id(tensor)][1]


def _number(value: complex) -> complex:
    """An IntEnum or a numpy.float64 is kept as the number that it is."""
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    number: complex = next(kind(value) for kind in kinds if isinstance(value, kind))
    return number


def joined(path: str, key: Any) -> str:
    """The path of an item: the one way in which both the writer and the reader name it."""
    return f"{path}[{key!r}]"


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor on the CPU with its strides, which decide about kernels, and without what else its storage holds.

    On the CPU nothing is copied, unless the storage is much larger: a batch is often a slice of the whole data set.
    """
    with torch.no_grad():
        kept = tensor.detach()
        if kept.layout is not torch.strided or kept.is_quantized:
            return kept.cpu()
        kept = kept.resolve_conj().resolve_neg()
        if kept.numel() == 0:
            return kept.cpu().clone().requires_grad_(tensor.requires_grad)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(kept.shape, kept.stride(), strict=True))
        if kept.device.type != "cpu" or kept.untyped_storage().nbytes() > 2 * extent * kept.element_size():
            flat = kept.as_strided((extent,), (1,))
            flat = flat.clone() if kept.device.type == "cpu" else flat.cpu()
            kept = flat.as_strided(kept.shape, kept.stride(), 0)
        return kept.requires_grad_(tensor.requires_grad)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dicts, each as often as it stands there."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested lists and dicts; one that comes twice counts once. Reads no device."""
    different = {id(tensor): tensor for tensor in tensors_in(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in different.values())
