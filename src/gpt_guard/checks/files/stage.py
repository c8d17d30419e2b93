"""Stage 2: the files a project has written are there, whole, and hold enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.records import CheckResult, Finding

EXPECTED = "there, not empty, readable as data"


class FilesStage(Stage):
    """One line for each file in `subject.paths`: its size and what was read from it, or why it cannot be used.

    The files were read when the subject was made; this stage looks at their sizes and contents only.
    """

    number = 2
    name = "files"
    title = "Files"

    def missing(self, subject: Subject) -> str | None:
        return None if subject.paths else "no files: everything was given as objects"

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        for kind, path in subject.paths.items():
            if kind in subject.unusable:
                found = subject.unusable[kind]
                yield self.failed(kind, f"{path.name}: unusable", EXPECTED, found)
            elif not path.exists():
                yield self.skipped(kind, f"there is no {path}")
            else:
                small = too_small(kind, path, subject)
                measured = f"{path.name}, {size(path)}{content(kind, subject)}"
                yield self.failed(kind, measured, EXPECTED, small) if small else self.passed(kind, measured, EXPECTED)


def too_small(kind: str, path: Path, subject: Subject) -> Finding | None:
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


def content(kind: str, subject: Subject) -> str:
    """What was read from a file, in a few words."""
    ids = subject.data.get(kind)
    if ids is not None:
        return f", {ids.numel():,} ids"
    if kind == "tokenizer" and subject.tokenizer is not None:
        return f", {subject.tokenizer.size:,} tokens"
    if kind == "checkpoint" and subject.payload is not None:
        return f", {count_tensors(subject.payload)} tensors"
    return ""


def count_tensors(value: Any) -> int:
    """Tensors anywhere in a payload."""
    if isinstance(value, Tensor):
        return 1
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(count_tensors, inside))
