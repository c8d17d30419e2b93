"""What gpt_guard writes down: plain, frozen, validated records that survive JSON, NaN included.

Nothing here knows torch: a record can be read in a process that has none. NaN and the infinities are written as the
strings "NaN", "Infinity" and "-Infinity", since JSON has no numbers for them and pydantic would write null.
"""

from __future__ import annotations

from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from gpt_guard.records.atomic import replacing
from gpt_guard.records.evidence import OperationSeen, Record, SourceLine, TensorStats

RUN_SCHEMA = "gpt_guard.run/1"
REPORT_SCHEMA = "gpt_guard.report/1"


class Severity(StrEnum):
    """How bad a finding is: `error` trains a broken model, `warning` probably does, `info` is only worth knowing."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Action(StrEnum):
    """What Guardian does about a finding: raise, say it once per cause, or only keep it."""

    HALT = "halt"
    WARN = "warn"
    RECORD = "record"


class Moment(StrEnum):
    """The places in a training step at which something is noticed."""

    START = "start"
    FORWARD = "forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    BEFORE_STEP = "before step"
    AFTER_STEP = "after step"
    EXIT = "exit"


class Observation(Record):
    """What was read at one optimizer step (or one evaluation forward): names and floats, no tensors.

    `loss` is the sum of the losses `backward()` was called on since the gradients were last cleared, which is the
    function whose gradient the step applies; with the usual division by the number of micro-batches it is their mean.
    `grad_norm` is the L2 norm after the last `backward()`, `grad_norm_clipped` the one just before `step()`; both are
    free of a GradScaler's scale. `step_time` is in seconds, from the end of one step to the end of the next.
    """

    step: int
    moment: Moment
    optimizer: int = 0
    evaluation: bool = False
    micro_batches: int = 0
    loss: float | None = None
    lr: tuple[float, ...] = ()
    grad_norm: float | None = None
    grad_norm_clipped: float | None = None
    clipped: bool | None = None
    update_ratio: float | None = None
    max_update: float | None = None
    tokens: int | None = None
    samples: int | None = None
    step_time: float | None = None
    skipped: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)
    grad_norms: dict[str, float | None] = Field(default_factory=dict, exclude=True, repr=False)
    readings: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)

    def largest_grads(self, count: int = 3) -> dict[str, float]:
        """The parameters with the largest gradient norms, largest first."""
        return self._ranked(reverse=True, count=count)

    def smallest_grads(self, count: int = 3) -> dict[str, float]:
        """The parameters with the smallest gradient norms, smallest first; those without gradient are left out."""
        return self._ranked(reverse=False, count=count)

    def _ranked(self, *, reverse: bool, count: int) -> dict[str, float]:
        known = [(name, norm) for name, norm in self.grad_norms.items() if norm is not None]
        # NaN compares with nothing: as the largest it stands where a reader looks for trouble.
        known.sort(key=lambda item: (item[1] != item[1], item[1]), reverse=reverse)
        return dict(known[:count])


class Finding(Record):
    """One thing that is wrong or worth knowing: what was seen, where, what it most likely is, what to do next.

    `module` is the path of the module that *made* the problem ("" is the model itself), never one that only received
    it. `causes` are ordered for this evidence. The fixed words come from the catalogue; `seen` and `origin` are
    written by the guard that judged.
    """

    code: str
    title: str
    severity: Severity
    seen: str
    step: int | None = None
    micro_batch: int | None = None
    moment: Moment | None = None
    evaluation: bool = False
    module: str | None = None
    module_class: str | None = None
    parameter: str | None = None
    position: str | None = Field(
        default=None, description="where in the structure the tensor sat, e.g. output[1]['loss']"
    )
    origin: str | None = Field(default=None, description="who made it and who only received it")
    where: SourceLine | None = None
    tensor: TensorStats | None = None
    evidence: dict[str, JsonValue] = Field(default_factory=dict)
    causes: tuple[str, ...] = ()
    next_test: str = ""
    fix: str = ""
    guard: str | None = None
    last_healthy: Observation | None = None
    history: tuple[Observation, ...] = ()
    operation: OperationSeen | None = Field(default=None, description="what a replay of the step has found")
    replay: str | None = Field(default=None, description="whether the replay reproduced it, and if not, why")
    bundle: str | None = Field(default=None, description="folder from which another process can run the step again")
    bundle_model: str | None = Field(default=None, description="the model's class as `--model` takes it, if importable")
    cause_id: str | None = Field(default=None, description="set where one module or parameter can have several causes")

    @property
    def cause(self) -> tuple[str, str | None, str | None, str | None]:
        """What makes two findings the same trouble: Guardian speaks once for each cause."""
        return (self.code, self.module, self.parameter, self.cause_id)


class CheckResult(Record):
    """The answer to one preflight question: the measured figure next to the expected one."""

    stage: str
    title: str
    status: Literal["passed", "failed", "skipped"]
    measured: str = ""
    expected: str = ""
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        expected = f", expected {self.expected}" if self.expected else ""
        lines = [f"  {found.code} {found.title}: {found.seen}\n  fix: {found.fix}" for found in self.findings]
        return "\n".join([f"{self.title}: {self.status}, {self.measured}{expected}", *lines])


class Report(Record):
    """Run facts, checks and findings: what two runs can be compared by."""

    schema_version: str = REPORT_SCHEMA
    environment: dict[str, str] = Field(default_factory=dict)
    model: str = ""
    parameters: int = 0
    steps: int = 0
    guards: tuple[str, ...] = ()
    not_watched: tuple[str, ...] = ()
    first_loss: float | None = None
    last_loss: float | None = None
    lr_min: float | None = None
    lr_max: float | None = None
    grad_norm_median: float | None = None
    grad_norm_max: float | None = None
    clipped_share: float | None = None
    skipped_steps: int = 0
    inspected_steps: int = 0
    inspection_seconds: float = Field(default=0.0, description="time that looking hard at those steps took")
    probes: dict[str, int] = Field(default_factory=dict, description="extra runs of the model in them, by name")
    watch_cost: float | None = Field(default=None, description="what Guardian took of the run's wall time, as a share")
    log: str | None = Field(default=None, description="the run log that was written")
    fingerprint: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    checks: tuple[CheckResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict, description="how often guards have reported each code")

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the report as JSON, whole or not at all; NaN and the infinities survive. Raises OSError."""
        path = Path(path)
        with replacing(path) as stream:
            stream.write(self.model_dump_json(indent=2).encode())
        return path
