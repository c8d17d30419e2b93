"""gpt_guard: flight instruments for a PyTorch training loop.

Names are loaded when they are first used, so that reading a run log or explaining a finding does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_guard.callbacks.base import Guard
    from gpt_guard.callbacks.eval_mode import EvalModeAssert
    from gpt_guard.callbacks.fingerprint import CheckpointFingerprint
    from gpt_guard.callbacks.finite import FiniteGuard
    from gpt_guard.callbacks.grad_norm import GradNormMonitor
    from gpt_guard.callbacks.lr import LRTracker
    from gpt_guard.callbacks.param_delta import ParamDeltaProbe
    from gpt_guard.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
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
    from gpt_guard.fingerprint import Fingerprint, tokenizer_digest
    from gpt_guard.guardian import Guardian
    from gpt_guard.records import Action, Finding, Moment, Observation, Report, Severity
    from gpt_guard.runlog import RunLog, read_run
    from gpt_guard.sinks.base import Sink
    from gpt_guard.sinks.console import ConsoleSink
    from gpt_guard.sinks.jsonl import JsonlSink

_HOME = {
    "Action": "records",
    "BlindError": "errors",
    "CheckpointError": "errors",
    "CheckpointFingerprint": "callbacks.fingerprint",
    "ConsoleSink": "sinks.console",
    "DataError": "errors",
    "EvalModeAssert": "callbacks.eval_mode",
    "Finding": "records",
    "Fingerprint": "fingerprint",
    "FingerprintMismatch": "errors",
    "FiniteGuard": "callbacks.finite",
    "GradNormMonitor": "callbacks.grad_norm",
    "GradientError": "errors",
    "Guard": "callbacks.base",
    "GuardError": "errors",
    "GuardUsageError": "errors",
    "Guardian": "guardian",
    "JsonlSink": "sinks.jsonl",
    "LRTracker": "callbacks.lr",
    "LoadedCheckpoint": "checkpoint",
    "ModeError": "errors",
    "Moment": "records",
    "NonFiniteError": "errors",
    "Observation": "records",
    "ParamDeltaProbe": "callbacks.param_delta",
    "ProcessError": "errors",
    "Report": "records",
    "RunLog": "runlog",
    "ScheduleError": "errors",
    "Severity": "records",
    "Sink": "sinks.base",
    "UpdateError": "errors",
    "load_checkpoint": "checkpoint",
    "read_run": "runlog",
    "save_checkpoint": "checkpoint",
    "tokenizer_digest": "fingerprint",
}

__all__ = [
    "Action",
    "BlindError",
    "CheckpointError",
    "CheckpointFingerprint",
    "ConsoleSink",
    "DataError",
    "EvalModeAssert",
    "Finding",
    "Fingerprint",
    "FingerprintMismatch",
    "FiniteGuard",
    "GradNormMonitor",
    "GradientError",
    "Guard",
    "GuardError",
    "GuardUsageError",
    "Guardian",
    "JsonlSink",
    "LRTracker",
    "LoadedCheckpoint",
    "ModeError",
    "Moment",
    "NonFiniteError",
    "Observation",
    "ParamDeltaProbe",
    "ProcessError",
    "Report",
    "RunLog",
    "ScheduleError",
    "Severity",
    "Sink",
    "UpdateError",
    "load_checkpoint",
    "read_run",
    "save_checkpoint",
    "tokenizer_digest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
