"""What gpt_guard writes down: findings, observations, reports, and their text; without torch."""

from gpt_guard.records.evidence import LikelyCause, Operand, OperationSeen, Record, SourceLine, TensorStats
from gpt_guard.records.run import (
    REPORT_SCHEMA,
    RUN_SCHEMA,
    Action,
    CheckResult,
    Finding,
    Moment,
    Observation,
    Report,
    Severity,
)

__all__ = [
    "REPORT_SCHEMA",
    "RUN_SCHEMA",
    "Action",
    "CheckResult",
    "Finding",
    "LikelyCause",
    "Moment",
    "Observation",
    "Operand",
    "OperationSeen",
    "Record",
    "Report",
    "Severity",
    "SourceLine",
    "TensorStats",
]
