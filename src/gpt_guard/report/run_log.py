"""Reading a run log back: `read_run(run_dir)` gives the observations and findings that JsonlSink wrote.

The file is untrusted data: each line is bounded in size, parsed as JSON and validated by pydantic. Torch is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import from_json

from gpt_guard.errors import GuardUsageError
from gpt_guard.records import RUN_SCHEMA, Finding, Observation, Record

RUN_FILE = "steps.jsonl"
# A step line has a few hundred bytes and a finding about ten thousand; far above, it is no run log.
MAX_LINE_BYTES = 1 << 22
_MOST_STEPS = 2**63 - 1
_FAMILY, _, _VERSION = RUN_SCHEMA.rpartition("/")
# val_loss, eval/loss, validation_loss; neither value_loss nor interval_loss.
_VALIDATION = re.compile(r"(?<![a-z])e?val(?!ue|ve)")
_TEST = re.compile(r"(?<![a-z])test")
R = TypeVar("R", bound=Record)


class LoggedMetrics(Record):
    """What `guardian.log(**metrics)` was given, and the optimizer step at which it was called."""

    step: int
    metrics: dict[str, float]


class RunLog(Record):
    """What a run log holds, in the order of the file; a resumed run has one header for each start.

    Steps that a run did again after a resume stand twice. Each observation's `grad_norms` holds the few largest and
    smallest that the log keeps. `torn` is true where a line was cut off by a killed process or a full disk.
    """

    headers: tuple[dict[str, JsonValue], ...] = ()
    steps: tuple[Observation, ...] = Field(default=(), repr=False)
    findings: tuple[Finding, ...] = ()
    metrics: tuple[LoggedMetrics, ...] = Field(default=(), repr=False)
    torn: bool = False


def is_validation_loss(name: str) -> bool:
    """Whether a name given to `guardian.log()` is that of a validation loss; accuracy rises where a loss falls."""
    return "loss" in name.lower() and _VALIDATION.search(name.lower()) is not None


def is_test_loss(name: str) -> bool:
    """The same for the loss on the test set."""
    return "loss" in name.lower() and _TEST.search(name.lower()) is not None


def read_run(path: str | PathLike[str]) -> RunLog:
    """Read the run log in a `run_dir`, or the file itself.

    A torn line is tolerated at the end, and before the header of a run that was resumed. Raises FileNotFoundError where
    there is no log, and GuardUsageError (a ValueError) for a file of another kind, a newer schema or a damaged line.
    """
    if not isinstance(path, (str, PathLike)):
        raise GuardUsageError(f"read_run({path!r:.60}) cannot work: give a run_dir of Guardian, or its {RUN_FILE}")
    file = Path(path)
    if file.is_dir():
        file = file / RUN_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"no run log at {file}: read_run takes the run_dir given to Guardian, or its {RUN_FILE}"
        )
    headers: list[dict[str, Any]] = []
    steps: list[Observation] = []
    findings: list[Finding] = []
    metrics: list[LoggedMetrics] = []
    torn: str | None = None
    seen_torn = False
    for place, raw in _lines(file):
        line = _parse(raw)
        kind = line.pop("kind", None) if line is not None else None
        if torn is not None and kind != "header":
            raise GuardUsageError(f"{torn}: this line is damaged (no JSON object), and the log goes on after it")
        torn = None
        if line is None and (headers or _begins_header(raw)):
            torn, seen_torn = place, True
        elif kind == "header":
            headers.append(_supported(line or {}, place))
        elif line is None or not headers:
            raise GuardUsageError(f"{place}: not a gpt_guard run log; it should begin with a header line")
        elif kind == "step":
            steps.append(_observation(line, place))
        elif kind == "finding":
            line.pop("action", None)
            findings.append(_validated(Finding, line, place))
        elif kind == "metrics":
            metrics.append(_validated(LoggedMetrics, line, place))
        else:
            raise GuardUsageError(f"{place}: {kind!r:.40} is no kind of line: header, step, finding, metrics")
    if not headers and not seen_torn:
        raise GuardUsageError(f"{file} is empty: nothing was logged, not even the header")
    return RunLog(
        headers=tuple(headers),
        steps=tuple(steps),
        findings=tuple(findings),
        metrics=tuple(metrics),
        torn=seen_torn,
    )


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    with file.open("rb") as stream:
        position = 0
        while raw := stream.readline(MAX_LINE_BYTES + 1):
            position += 1
            if len(raw) > MAX_LINE_BYTES:
                raise GuardUsageError(f"{file}:{position}: this line is longer than {MAX_LINE_BYTES} bytes: no run log")
            if raw != b"\n":
                yield f"{file}:{position}", raw


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = from_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _begins_header(raw: bytes) -> bool:
    start = b'{"kind":"header"'
    return raw.startswith(start) or start.startswith(raw.rstrip(b"\n"))


def _supported(header: dict[str, Any], place: str) -> dict[str, Any]:
    schema = header.get("schema")
    family, _, version = str(schema).rpartition("/")
    if family != _FAMILY or not version.isdecimal():
        raise GuardUsageError(f"{place}: not a gpt_guard run log: schema is {schema!r:.60}, expected {RUN_SCHEMA!r}")
    if version != _VERSION:
        raise GuardUsageError(
            f"{place}: written with schema {schema!r}, this gpt_guard reads {RUN_SCHEMA!r}; "
            f"read it with the gpt_guard that wrote it, or a newer one"
        )
    return header


def _observation(line: dict[str, Any], place: str) -> Observation:
    kept = {"smallest_grads": line.pop("smallest_grads", {}), "largest_grads": line.pop("largest_grads", {})}
    for name, norms in kept.items():
        if not isinstance(norms, dict):
            raise GuardUsageError(f"{place}: {name} should be an object of names and norms")
    return _validated(Observation, {**line, "grad_norms": kept["largest_grads"] | kept["smallest_grads"]}, place)


def _validated(kind: type[R], fields: dict[str, Any], place: str) -> R:
    try:
        made = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise GuardUsageError(f"{place}: damaged {_word(kind)}: {field}: {first['msg']}") from None
    step = getattr(made, "step", None)
    if step is not None and not 0 <= step <= _MOST_STEPS:
        raise GuardUsageError(f"{place}: damaged {_word(kind)}: step {step!s:.20} cannot be a number of steps")
    return made


def _word(kind: type[Record]) -> str:
    return kind.__name__.removeprefix("Logged").lower()
