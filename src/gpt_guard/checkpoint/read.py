"""Read a file that may be anything, as data only, and say what it is where it is no checkpoint."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpt_guard.checkpoint.fingerprint.naming import printable, some
from gpt_guard.checkpoint.pickles import is_hostile, unsafe_globals
from gpt_guard.checkpoint.say import Voice


def read_payload(path: Path, voice: Voice, max_bytes: int | None) -> Any:
    """Return what a checkpoint file holds, all tensors on the CPU.

    Reads with `weights_only=True`, so that nothing in the file is executed. Refuses, as GG707, what is missing, cut
    short, larger than `max_bytes` (by default, than the machine's memory), of another format, or needs code to run.
    """
    size = _size(path, voice)
    limit = memory_size() if max_bytes is None else max_bytes
    if limit is not None and size > limit:
        seen = f"{path} has {size} bytes; at most {limit} may be read (max_bytes)"
        voice.refuse("GG707", seen, known=["too_large"], evidence={"size": size, "limit": limit})
    _refuse_other_formats(path, size, voice)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile or broken file can make the reader raise nearly anything
        _explain(path, size, error, voice)


def memory_size() -> int | None:
    """Return this machine's memory in bytes, or None where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _size(path: Path, voice: Voice) -> int:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        folder = path.parent
        near = sorted(item.name for item in folder.iterdir() if item.suffix == path.suffix) if folder.is_dir() else []
        beside = f"; {folder} holds {some(near)}" if near else ""
        gone = "" if folder.is_dir() else f"; its folder {folder} does not exist either"
        voice.refuse("GG707", f"there is no file {path}{gone}{beside}", known=["missing"], because=error)
    except OSError as error:
        voice.refuse("GG707", f"cannot look at {path}: {error.strerror}", known=["access"], because=error)
    if stat.S_ISDIR(status.st_mode):
        inside = some(sorted(item.name for item in path.iterdir()))
        voice.refuse("GG707", f"{path} is a folder; it holds {inside or 'nothing'}", known=["folder"])
    if not stat.S_ISREG(status.st_mode):
        voice.refuse("GG707", f"{path} is a device, pipe or socket, not a file", known=["foreign"])
    if status.st_size == 0:
        voice.refuse("GG707", f"{path} is empty (0 bytes)", known=["empty"])
    return status.st_size


def _refuse_other_formats(path: Path, size: int, voice: Voice) -> None:
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
    except OSError as error:
        voice.refuse("GG707", f"cannot read {path}: {error.strerror}", known=["access"], because=error)
    start = f"{path} ({size} bytes)"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        voice.refuse("GG707", f"{start} is a safetensors file", known=["safetensors"])
    if head.startswith(b"version https://git-lfs"):
        seen = f"{start} is a Git LFS pointer, not the file itself; `git lfs pull` brings that"
        voice.refuse("GG707", seen, known=["text"])
    if _is_text(head):
        voice.refuse("GG707", f"{start} is text and begins with {head[:40]!r}", known=["text"])
    if head.startswith(b"PK"):
        _refuse_bad_archive(path, size, voice)


def _is_text(head: bytes) -> bool:
    # The legacy format and pickles begin with 0x80, zip archives hold NUL bytes within their first 30.
    return not any(byte < 9 or 13 < byte < 32 or byte >= 127 for byte in head[:30])


def _refuse_bad_archive(path: Path, size: int, voice: Voice) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, RuntimeError, ValueError, OSError) as error:
        seen = f"{path} ({size} bytes) begins like a torch checkpoint but has no end: {printable(error)}"
        voice.refuse("GG707", seen, known=["truncated"], because=error)
    claimed = sum(entry.file_size for entry in entries)
    if claimed > size:  # torch.save stores without compression: only a crafted or repacked archive can hold more
        seen = f"{path} ({size} bytes) claims to hold {claimed} bytes"
        voice.refuse("GG707", seen, known=["too_large"], evidence={"size": size, "claimed": claimed})
    names = [entry.filename for entry in entries]
    if any(name.endswith("/constants.pkl") for name in names):
        voice.refuse("GG707", f"{path} is a TorchScript archive", known=["torchscript"])
    if not any(name.endswith("/data.pkl") for name in names):
        voice.refuse("GG707", f"{path} is a zip archive that holds {some(names)}, no data.pkl", known=["foreign"])


def _explain(path: Path, size: int, error: Exception, voice: Voice) -> NoReturn:
    start = f"{path} ({size} bytes)"
    needs = unsafe_globals(path)
    if hostile := [name for name in needs if is_hostile(name)]:
        seen = f"{start} would call {some(hostile)} when unpickled; nothing of it was run"
        fix = (
            "Do not load it by other means (weights_only=False would run it). Get the weights from a source you trust."
        )
        voice.refuse("GG707", seen, known=["code"], because=error, fix=fix, evidence={"globals": list(needs)})
    if needs:
        voice.refuse(
            "GG707",
            f"{start} holds objects of {some(needs)}; reading them would run their code",
            known=["objects"],
            because=error,
            fix=_plain_data_fix(needs),
            evidence={"globals": list(needs)},
        )
    words = printable((str(error) or type(error).__name__).splitlines()[0], 200)
    if isinstance(error, EOFError) or "EOF" in words or "central directory" in words:
        voice.refuse("GG707", f"{start} ends too early: {words}", known=["truncated"], because=error)
    if isinstance(error, MemoryError):
        voice.refuse("GG707", f"{start} does not fit into memory", known=["too_large"], because=error)
    voice.refuse("GG707", f"{start} cannot be read: {words}", known=["foreign"], because=error)


def _plain_data_fix(needs: Iterable[str]) -> str:
    """What to write instead, in the program that saved it."""
    advice = ["In the program that wrote it, save plain data:"]
    if any(name.startswith("torch.nn.") for name in needs):
        advice.append("model.state_dict() for the model;")
    if any(name.startswith("numpy.") for name in needs):
        advice.append("float(x) or torch.from_numpy(x) for NumPy values;")
    advice.append("vars(config) or dataclasses.asdict(config) for a config object.")
    return " ".join(advice)
