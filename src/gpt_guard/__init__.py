"""gpt_guard: flight instruments for a PyTorch training loop.

Names are loaded when they are first used, so that reading a run log or explaining a finding does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_guard.callbacks.base import Guard
    from gpt_guard.callbacks.finite import FiniteGuard
    from gpt_guard.errors import (
        BlindError,
        CheckpointError,
        DataError,
        FingerprintMismatch,
        GradientError,
        GuardError,
        GuardUsageError,
        ModeError,
        NonFiniteError,
        ProcessError,
        ScheduleError,
        UpdateError,
    )
    from gpt_guard.guardian import Guardian
    from gpt_guard.records import Finding, Observation, Report, Severity
    from gpt_guard.runlog import RunLog, read_run

_HOME = {
    "BlindError": "errors",
    "CheckpointError": "errors",
    "DataError": "errors",
    "Finding": "records",
    "FingerprintMismatch": "errors",
    "FiniteGuard": "callbacks.finite",
    "GradientError": "errors",
    "Guard": "callbacks.base",
    "GuardError": "errors",
    "GuardUsageError": "errors",
    "Guardian": "guardian",
    "ModeError": "errors",
    "NonFiniteError": "errors",
    "Observation": "records",
    "ProcessError": "errors",
    "Report": "records",
    "RunLog": "runlog",
    "ScheduleError": "errors",
    "Severity": "records",
    "UpdateError": "errors",
    "read_run": "runlog",
}

__all__ = [
    "BlindError",
    "CheckpointError",
    "DataError",
    "Finding",
    "FingerprintMismatch",
    "FiniteGuard",
    "GradientError",
    "Guard",
    "GuardError",
    "GuardUsageError",
    "Guardian",
    "ModeError",
    "NonFiniteError",
    "Observation",
    "ProcessError",
    "Report",
    "RunLog",
    "ScheduleError",
    "Severity",
    "UpdateError",
    "read_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
