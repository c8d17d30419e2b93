"""Fingerprint: the digests of all parts a run is made of, and which of them differ from another run's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from gpt_guard.checkpoint.fingerprint.config import config_digest
from gpt_guard.checkpoint.fingerprint.vocabulary import tokenizer_digest
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Record

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One file or folder, or several."""


class Difference(Record):
    """One part that two fingerprints both know and do not agree on."""

    part: str
    ours: str
    theirs: str


class Fingerprint(Record):
    """Digests by part: "tokenizer", "config", "weights", "optimizer", "data:FILE", "text:NAME"."""

    parts: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        tokenizer: Any = None,
        config: Any = None,
        data: Files = (),
        texts: Mapping[str, str] | None = None,
    ) -> Fingerprint:
        """Digest what is given: a tokenizer, a config, files or folders of data, texts by name (a chat template).

        Reads the files whole, not the device. Raises GuardUsageError for a file that cannot be read.
        """
        parts: dict[str, str] = {}
        if tokenizer is not None:
            parts["tokenizer"] = tokenizer_digest(tokenizer)
        if config is not None:
            parts["config"] = config_digest(config)
        for path in as_paths(data):
            # The file's name, so that a run moved to another machine still compares; the path where names collide.
            name = f"data:{path.name}"
            parts[name if name not in parts else f"data:{path.as_posix()}"] = file_digest(path)
        parts |= {f"text:{name}": text_digest(text) for name, text in (texts or {}).items()}
        return cls(parts=parts)

    def compare(self, other: Fingerprint) -> tuple[Difference, ...]:
        """Return the parts that both know with different digests, `self` being "ours"."""
        return tuple(
            Difference(part=part, ours=digest, theirs=other.parts[part])
            for part, digest in self.parts.items()
            if part in other.parts and other.parts[part] != digest
        )


def as_paths(files: Files) -> list[Path]:
    """Return one path or several as a list. Raises GuardUsageError for what is no path."""
    found = [files] if isinstance(files, (str, os.PathLike)) or not isinstance(files, Iterable) else list(files)
    if wrong := [each for each in found if not isinstance(each, (str, os.PathLike))]:
        raise GuardUsageError(f"data holds {wrong[0]!r:.60}; expected paths of files or folders")
    return [Path(path) for path in found]


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256, in hex, of a file's bytes, or of a folder's: the sorted relative names and their digests.

    Reads in small blocks. Raises GuardUsageError where there is nothing to read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            listing = hashlib.sha256()
            for file in sorted(item for item in path.rglob("*") if item.is_file()):
                listing.update(f"{file.relative_to(path).as_posix()}\0{file_digest(file)}\n".encode())
            return listing.hexdigest()
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise GuardUsageError(f"cannot read {path} to fingerprint it: {error.strerror or error}") from error


def text_digest(text: str) -> str:
    """Return the SHA-256, in hex, of a text in UTF-8, exactly as it is: line ends and blanks count."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
