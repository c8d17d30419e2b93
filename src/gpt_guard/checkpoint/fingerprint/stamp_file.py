"""fingerprint.json: what the runs in a folder, or a cache, are made of, kept from one run to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from gpt_guard.records import Record
from gpt_guard.records.atomic import replacing

NAME = "fingerprint.json"
MAX_BYTES = 64 * 2**20
"""A larger file is not read; with a vocabulary of 256k tokens it has some 4 MB."""


class StampFile(Record):
    """Digests by part, and the tokens and config themselves, so that a difference can be shown."""

    schema_version: Literal["gpt_guard.checkpoint.fingerprint/1"] = "gpt_guard.checkpoint.fingerprint/1"
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
