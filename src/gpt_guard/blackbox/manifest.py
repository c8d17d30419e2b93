"""What a bundle holds: the names of its files, their sizes and digests, and what was left out. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from gpt_guard.records import Record

BUNDLE_SCHEMA: Literal["gpt_guard.bundle/1"] = "gpt_guard.bundle/1"

MANIFEST = "manifest.json"


class FileName(StrEnum):
    """All names that a bundle can have: a manifest that names any other, such as one with a path in it, is refused."""

    FINDING = "finding.json"
    REPORT = "report.json"
    STEPS = "steps.jsonl"
    ENVIRONMENT = "environment.json"
    SOURCE = "source.json"
    RECIPE = "recipe.json"
    MODES = "modes.json"
    BATCH = "batch.pt"
    RNG = "rng.pt"
    LOSS = "loss.pt"
    GRADIENTS = "output_gradients.pt"
    MODEL = "model.pt"
    OPTIMIZER = "optimizer.pt"


class StoredFile(Record):
    """One file of a bundle: size in bytes, SHA-256 in hex."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class LeftOut(Record):
    """Something that a bundle does not hold, and why."""

    what: str = Field(max_length=1000)
    why: str = Field(max_length=1000)

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Manifest(Record):
    """The list of a bundle's files, written last: `step` and `code` are those of the finding.

    `holes` are paths in the batch at which something stood that is no plain data; `devices` says where tensors of the
    batch lay that were not on the CPU.
    """

    schema_version: Literal["gpt_guard.bundle/1"] = BUNDLE_SCHEMA
    gpt_guard: str = Field(max_length=100)
    written: str = Field(max_length=100)
    step: int | None = None
    code: str = Field(max_length=100)
    files: dict[FileName, StoredFile]
    left_out: Annotated[tuple[LeftOut, ...], Field(max_length=10_000)] = ()
    holes: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()
    devices: dict[str, str] = Field(default_factory=dict)
