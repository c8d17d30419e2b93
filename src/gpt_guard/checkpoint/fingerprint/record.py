"""Fingerprint: the digests of all parts a run is made of, the file that keeps them, and the findings on differences."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint.config import config_digest
from gpt_guard.checkpoint.fingerprint.vocabulary import tokenizer_digest
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Finding, Record
from gpt_guard.records.atomic import replacing
from gpt_guard.records.render import printable

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


NAME = "fingerprint.json"
MAX_BYTES = 64 * 2**20
"""A larger file is not read; with a vocabulary of 256k tokens it has some 4 MB."""


class StampFile(Record):
    """Digests by part, and the tokens and config themselves, so that a difference can be shown."""

    schema_version: Literal["gpt_guard.fingerprint/1"] = "gpt_guard.fingerprint/1"
    parts: dict[str, str] = Field(default_factory=dict)
    tokens: list[str] | None = None
    config: dict[str, Any] | None = None


def read_stamp(folder: Path, name: str = NAME) -> StampFile | None:
    """Return what an earlier run left in this folder, or None. Raises ValueError for a file that is not one."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES} bytes")
        return StampFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))} {first['msg']}".replace(":  ", ": ")) from None


def write_stamp(folder: Path, stamp: StampFile, name: str = NAME) -> None:
    """Write the file in one move. Raises OSError where the folder cannot be written."""
    with replacing(folder / name) as stream:
        stream.write(stamp.model_dump_json(indent=1).encode("utf-8", "surrogatepass") + b"\n")


SHORT = 12
"""Hex digits of a digest that a sentence shows; the evidence holds all 64."""


def tokenizer_finding(
    difference: Difference, where: str, old: Sequence[str] | None, new: Sequence[str] | None
) -> Finding:
    """GG701 with the first id that stands for another token, where both vocabularies are known."""
    seen = f"{where} was made with tokenizer {difference.theirs[:SHORT]}; the one in use is {difference.ours[:SHORT]}"
    evidence: dict[str, Any] = {"checkpoint": difference.theirs, "now": difference.ours}
    likely: list[str] = []
    if new is not None:
        evidence["tokens_now"] = len(new)
    if old is not None and new is not None:
        evidence["tokens_checkpoint"] = len(old)
        first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        there, here = (tokens[first] if first < len(tokens) else None for tokens in (old, new))
        evidence |= {"first_differing_id": first, "token_checkpoint": there, "token_now": here}
        seen += (
            f". Id {first} is {_token(there)} there and {_token(here)} here ({len(old)} tokens there, {len(new)} here)"
        )
        likely = _token_causes(old, new, first)
    elif new is not None and tokenizer_digest(sorted(new)) == difference.theirs:
        seen += ". The saved one has the same tokens in sorted order"
        likely = ["order"]
    return finding("GG701", seen, likely=likely, evidence=evidence)


def config_finding(where: str, changes: Mapping[str, tuple[Any, Any]]) -> Finding:
    """GG702 with every key that differs, old and new."""
    listed = [f"{printable(key)} was {printable(old)}, is {printable(new)}" for key, (old, new) in changes.items()]
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    evidence = {key: {"checkpoint": old, "now": new} for key, (old, new) in changes.items()}
    seen = f"{'; '.join(listed[:6])}{more} ({where})"
    return finding("GG702", seen, likely=["edited"], evidence={"changes": evidence})


def part_finding(difference: Difference, where: str) -> Finding:
    """GG703 for a data file or a text."""
    kind, _, name = difference.part.partition(":")
    what = {"data": "data file", "text": "text"}.get(kind, kind)
    seen = (
        f"{what} {printable(name) or difference.part}: {where} was made with {difference.theirs[:SHORT]}; "
        f"the one in use is {difference.ours[:SHORT]}"
    )
    likely = ["template" if kind == "text" else "rebuilt"]
    evidence: dict[str, Any] = {"part": difference.part, "checkpoint": difference.theirs, "now": difference.ours}
    return finding("GG703", seen, likely=likely, evidence=evidence, cause_id=difference.part)


def _token(token: str | None) -> str:
    return "no token" if token is None else ascii(token[:40])


def _token_causes(old: Sequence[str], new: Sequence[str], first: int) -> list[str]:
    if first == min(len(old), len(new)):
        return ["extended"]
    return ["order"] if sorted(old) == sorted(new) else ["other_text"]
