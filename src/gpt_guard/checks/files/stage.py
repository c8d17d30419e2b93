"""Stage 2: the files a project has written are there, whole, and hold enough; and how they are read, as data only.

Nothing in a file is executed, whatever it holds; what cannot be used raises UnusableFile with a finding that names the
file, what is wrong with it, and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpt_guard.catalogue import entry, finding
from gpt_guard.checkpoint.fingerprint import token_list
from gpt_guard.checkpoint.read import memory_size, read_payload
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checks.runner.base import Need, Stage, Subject
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer, adapt
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import printable, some

MAX_TOKENIZER_BYTES = 256 * 2**20
"""The largest public vocabularies (256k tokens) take some 35 MB as JSON."""
TOKENIZERS_EXTRA = "python -m pip install 'gpt-guard-torch[tokenizers]'"
EXPECTED = "there, not empty, readable as data"


class FilesStage(Stage):
    """One line for each file in `subject.paths`: its size and what was read from it, or why it cannot be used.

    The files were read when the subject was made; this stage looks at their sizes and contents only.
    """

    number = 2
    name = "files"
    title = "Files"
    needs = (Need(lambda subject: subject.paths or None, "no files: everything was given as objects"),)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        for kind, path in subject.paths.items():
            if kind in subject.unusable:
                yield self.line(kind, f"{path.name}: unusable", EXPECTED, subject.unusable[kind])
            elif not path.exists():
                yield self.skipped(kind, f"there is no {path}")
            else:
                measured = f"{path.name}, {size(path)}{_content(kind, subject)}"
                yield self.line(kind, measured, EXPECTED, _too_small(kind, path, subject))


class UnusableFile(Exception):
    """A file that cannot be used; `.finding` says why, and what to do."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding

    def __str__(self) -> str:
        return self.finding.seen


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint file holds, on the CPU. Raises UnusableFile (GG707) for anything but a dict."""
    payload = _read_torch(path)
    if not isinstance(payload, Mapping):
        seen = f"{path} holds a {type(payload).__name__}, not a dict of weights"
        raise UnusableFile(finding("GG707", seen, likely=["payload"]))
    return payload


def read_ids(path: Path) -> Tensor:
    """Return the token ids in a `.pt`, `.npy` or `.bin` file (raw uint16, as nanoGPT writes them), on the CPU.

    Shape and dtype are as in the file: judging them is a check of its own. Raises UnusableFile (GG615).
    """
    again = "Write it again: torch.save(torch.tensor(ids), path) with a list of token ids."
    if path.suffix in (".npy", ".bin"):
        _refuse_unreadable(path, memory_size(), again)
        ids = _read_npy(path) if path.suffix == ".npy" else _read_bin(path)
    else:
        try:
            ids = _read_torch(path)
        except UnusableFile as error:
            raise _as_file(error.finding, path, again) from None
    if isinstance(ids, (list, tuple)) and ids and all(type(value) is int for value in ids):
        ids = torch.tensor(ids)
    if not isinstance(ids, Tensor):
        inside = f" with the keys {some(ids)}" if isinstance(ids, Mapping) else ""
        what = f"a {type(ids).__name__}{inside}, not a tensor of token ids"
        _refuse(path, f"holds {what}", "not_ids", f"{again} Or give the file that holds the encoded text.")
    if ids.numel() == 0:
        _refuse(path, "holds a tensor without a single token id", "empty", again)
    return ids


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a JSON file, or in a folder with a `tokenizer.json`.

    Understood are `{"chars": [...]}`, a list of characters, and the format of Hugging Face's `tokenizers`, which needs
    the extra of that name. Raises UnusableFile (GG615).
    """
    again = 'Write it again: {"chars": [...]} as UTF-8 JSON, or tokenizer.save("tokenizer.json") of a Hugging Face one.'
    if path.is_dir():
        inside = sorted(item.name for item in path.iterdir())
        if "tokenizer.json" not in inside:
            fix = "Give the tokenizer's file itself, or a folder that save_pretrained of a fast tokenizer wrote."
            _refuse(path, f"is a folder without a tokenizer.json; it holds {some(inside) or 'nothing'}", "folder", fix)
        path = path / "tokenizer.json"
    _refuse_unreadable(path, MAX_TOKENIZER_BYTES, again)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        _refuse(
            path, f"is not valid JSON: {printable(error)}", "truncated" if _ends_early(error) else "json", again, error
        )
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        return _hugging_face(path, again)
    try:
        tokens = token_list(content) or []
    except (GuardUsageError, TypeError, ValueError) as error:
        _refuse(path, f"is JSON, but no tokenizer: {printable(error, 200)}", "json", again, because=error)
    if not tokens:
        _refuse(path, "holds no token at all", "empty", again)
    if any(len(token) > 1 for token in tokens) and not (isinstance(content, Mapping) and "chars" in content):
        fix = "Give the whole tokenizer (Hugging Face's tokenizer.json), or the tokenizer object from Python."
        _refuse(path, "is a list of tokens of several characters, without rules that say how to encode", "json", fix)
    return adapt(tokens)


def _read_torch(path: Path) -> Any:
    try:
        return read_payload(path, Reporter(None), None)
    except CheckpointError as error:
        raise UnusableFile(error.finding) from None


def _as_file(refused: Finding, path: Path, again: str) -> UnusableFile:
    """The same evidence in words for any file: the reader speaks of checkpoints."""
    keys = {cause.text: cause.key for cause in entry("GG707").causes}
    known = {cause.key for cause in entry("GG615").causes}
    key = keys.get(refused.causes[0], "format")
    other = {"text": "not_ids", "code": "objects", "payload": "not_ids"}
    cause = other.get(key, key if key in known else "format")
    evidence = {**refused.evidence, "path": str(path)}
    fix = "Check the path, or run the preparation of the data." if cause == "missing" else again
    return UnusableFile(finding("GG615", refused.seen, likely=[cause], fix=fix, evidence=evidence))


def _refuse(path: Path, seen: str, cause: str, fix: str, because: BaseException | None = None) -> NoReturn:
    raise UnusableFile(
        finding("GG615", f"{path}: {seen}", likely=[cause], fix=fix, evidence={"path": str(path)})
    ) from because


def _refuse_unreadable(path: Path, limit: int | None, again: str) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except FileNotFoundError as error:
        near = sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else []
        where = f"{path.parent} holds {some(near) or 'nothing'}" if path.parent.is_dir() else "nor is there its folder"
        _refuse(path, f"there is no such file; {where}", "missing", "Check the path and the working folder.", error)
    except IsADirectoryError as error:
        _refuse(path, "is a folder", "folder", "Give the path of the file in it.", error)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "access", "Check its permissions.", error)
    if size == 0:
        _refuse(path, "is empty (0 bytes)", "empty", again)
    if limit is not None and size > limit:
        _refuse(path, f"has {size} bytes; at most {limit} are read", "too_large", again)


def _read_bin(path: Path) -> Tensor:
    raw = bytearray(path.read_bytes())
    if len(raw) % 2:
        fix = "Write it again: numpy.array(ids, dtype=numpy.uint16).tofile(path)."
        _refuse(path, f"has {len(raw)} bytes, which is no whole number of uint16 ids", "truncated", fix)
    return torch.frombuffer(raw, dtype=torch.uint16)


def _read_npy(path: Path) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        _refuse(path, "reading .npy needs numpy", "package", "python -m pip install numpy", error)
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except Exception as error:  # a damaged header makes numpy raise nearly anything
        fix = "Write it again: numpy.save(path, ids) with a plain array of integers."
        _refuse(path, f"cannot be read as an array: {printable(error)}", "format", fix, error)


def _ends_early(error: Exception) -> bool:
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip())


def _hugging_face(path: Path, again: str) -> Tokenizer:
    try:
        library = import_module("tokenizers")
    except ImportError as error:
        _refuse(
            path, "reading a Hugging Face tokenizer needs the package tokenizers", "package", TOKENIZERS_EXTRA, error
        )
    try:
        return adapt(library.Tokenizer.from_file(str(path)))
    except Exception as error:  # the Rust side raises plain Exception
        _refuse(path, f"is not a tokenizer that `tokenizers` can read: {printable(error)}", "json", again, error)


def _too_small(kind: str, path: Path, subject: Subject) -> Finding | None:
    """A finding for a file that can be read, but holds too little; None if it holds enough.

    A split must have one row, `block_size` ids and the target of the last one. Training data must not be less than
    the validation data: that is the order in which splits are made everywhere.
    """
    ids = subject.data.get(kind)
    if ids is not None:
        count, train, val = ids.numel(), subject.data.get("train"), subject.data.get("val")
        if subject.block_size is not None and count <= subject.block_size:
            seen = f"{path}: {count} ids; one row of block_size {subject.block_size} and its targets need one more"
            return finding("GG616", seen, likely=["stopped", "block_size"], evidence={"ids": count})
        if kind == "train" and val is not None and train is not None and train.numel() < val.numel():
            seen = f"{path}: {train.numel()} ids to train on, but {val.numel()} to validate on"
            return finding("GG616", seen, likely=["swapped", "stopped"], evidence={"ids": count})
    if kind == "tokenizer" and subject.tokenizer is not None and 0 < subject.tokenizer.size < 2:
        seen = f"{path}: {subject.tokenizer.size} token; there is nothing to predict"
        return finding("GG616", seen, likely=["sample"])
    return None


def size(path: Path) -> str:
    """The size of a file, or of the files directly in a folder, as a person reads it."""
    files = [item for item in path.iterdir() if item.is_file()] if path.is_dir() else [path]
    amount = float(sum(item.stat().st_size for item in files))
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return ""


def _content(kind: str, subject: Subject) -> str:
    """What was read from a file, in a few words."""
    ids = subject.data.get(kind)
    if ids is not None:
        return f", {ids.numel():,} ids"
    if kind == "tokenizer" and subject.tokenizer is not None:
        return f", {subject.tokenizer.size:,} tokens"
    if kind == "checkpoint" and subject.payload is not None:
        return f", {_count_tensors(subject.payload)} tensors"
    return ""


def _count_tensors(value: Any) -> int:
    """Tensors anywhere in a payload."""
    if isinstance(value, Tensor):
        return 1
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_count_tensors, inside))
