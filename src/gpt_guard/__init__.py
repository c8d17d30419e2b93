"""gpt_guard: flight instruments for a PyTorch training loop.

Names are loaded when they are first used, so that reading a run log or explaining a finding does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_guard.blackbox.replay import replay
    from gpt_guard.callbacks.attention.embedding import IndexCalls
    from gpt_guard.callbacks.attention.guard import AttentionCalls
    from gpt_guard.callbacks.base import Guard
    from gpt_guard.callbacks.checkpointing.fingerprint import CheckpointFingerprint
    from gpt_guard.callbacks.checkpointing.restore import RestoreWatch
    from gpt_guard.callbacks.data.guard import DataWatch
    from gpt_guard.callbacks.distributed.replicas import ReplicaSync
    from gpt_guard.callbacks.finite.guard import FiniteGuard
    from gpt_guard.callbacks.first_look.guard import FirstLook
    from gpt_guard.callbacks.gradients.guard import GradNormMonitor
    from gpt_guard.callbacks.logged.guards import LoggedLoss, LoggedUpdate
    from gpt_guard.callbacks.loop_order.guard import LoopOrder
    from gpt_guard.callbacks.losses.guard import LossInputs
    from gpt_guard.callbacks.losses.terms import LossBalance, loss_balance
    from gpt_guard.callbacks.modes.frozen import FreezeInTrain
    from gpt_guard.callbacks.modes.guard import EvalModeAssert
    from gpt_guard.callbacks.modes.recomputed import Recomputed
    from gpt_guard.callbacks.precision.autocast import AutocastUse
    from gpt_guard.callbacks.probes.guard import ModelProbe
    from gpt_guard.callbacks.schedule.guard import LRTracker
    from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
    from gpt_guard.callbacks.updates.tied import TiedWeights
    from gpt_guard.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
    from gpt_guard.checkpoint.cache import cached, stamp_cache, verify_cache
    from gpt_guard.checkpoint.fingerprint import Fingerprint, tokenizer_digest
    from gpt_guard.checks.asserts import (
        CheckFailed,
        assert_batch_independent,
        assert_causal,
        assert_checkpoint_roundtrip,
        assert_eval_deterministic,
        assert_gradients_reach_all,
        assert_ids_in_range,
        assert_initial_loss,
        assert_overfits,
        assert_returns,
        assert_roundtrip,
        assert_shifted,
        assert_step_changes_parameters,
    )
    from gpt_guard.checks.returns import check_returns
    from gpt_guard.checks.runner.report import PreflightReport
    from gpt_guard.checks.runner.run import check
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
        PreflightError,
        ProcessError,
        ScheduleError,
        UpdateError,
    )
    from gpt_guard.guardian import Guardian
    from gpt_guard.records import Action, CheckResult, Finding, Moment, Observation, Report, Severity
    from gpt_guard.report.compare import Change, compare_reports
    from gpt_guard.report.file import read_report
    from gpt_guard.report.run_log import RunLog, read_run
    from gpt_guard.runtime.data_stages import stages
    from gpt_guard.sinks.base import Sink
    from gpt_guard.sinks.console import ConsoleSink
    from gpt_guard.sinks.files import JsonlSink

_HOME = {
    "Action": "records",
    "AttentionCalls": "callbacks.attention.guard",
    "AutocastUse": "callbacks.precision.autocast",
    "BlindError": "errors",
    "Change": "report.compare",
    "CheckFailed": "checks.asserts",
    "CheckResult": "records",
    "CheckpointError": "errors",
    "CheckpointFingerprint": "callbacks.checkpointing.fingerprint",
    "ConsoleSink": "sinks.console",
    "DataError": "errors",
    "DataWatch": "callbacks.data.guard",
    "EvalModeAssert": "callbacks.modes.guard",
    "Finding": "records",
    "Fingerprint": "checkpoint.fingerprint",
    "FingerprintMismatch": "errors",
    "FiniteGuard": "callbacks.finite.guard",
    "FirstLook": "callbacks.first_look.guard",
    "FreezeInTrain": "callbacks.modes.frozen",
    "GradNormMonitor": "callbacks.gradients.guard",
    "GradientError": "errors",
    "Guard": "callbacks.base",
    "GuardError": "errors",
    "GuardUsageError": "errors",
    "Guardian": "guardian",
    "IndexCalls": "callbacks.attention.embedding",
    "JsonlSink": "sinks.files",
    "LRTracker": "callbacks.schedule.guard",
    "LoadedCheckpoint": "checkpoint",
    "LoggedLoss": "callbacks.logged.guards",
    "LoggedUpdate": "callbacks.logged.guards",
    "LoopOrder": "callbacks.loop_order.guard",
    "LossBalance": "callbacks.losses.terms",
    "LossInputs": "callbacks.losses.guard",
    "ModeError": "errors",
    "ModelProbe": "callbacks.probes.guard",
    "Moment": "records",
    "NonFiniteError": "errors",
    "Observation": "records",
    "ParamDeltaProbe": "callbacks.updates.guard",
    "PreflightError": "errors",
    "PreflightReport": "checks.runner.report",
    "ProcessError": "errors",
    "Recomputed": "callbacks.modes.recomputed",
    "ReplicaSync": "callbacks.distributed.replicas",
    "Report": "records",
    "RestoreWatch": "callbacks.checkpointing.restore",
    "RunLog": "report.run_log",
    "ScheduleError": "errors",
    "Severity": "records",
    "Sink": "sinks.base",
    "TiedWeights": "callbacks.updates.tied",
    "UpdateError": "errors",
    "assert_batch_independent": "checks.asserts",
    "assert_causal": "checks.asserts",
    "assert_checkpoint_roundtrip": "checks.asserts",
    "assert_eval_deterministic": "checks.asserts",
    "assert_gradients_reach_all": "checks.asserts",
    "assert_ids_in_range": "checks.asserts",
    "assert_initial_loss": "checks.asserts",
    "assert_overfits": "checks.asserts",
    "assert_returns": "checks.asserts",
    "assert_roundtrip": "checks.asserts",
    "assert_shifted": "checks.asserts",
    "assert_step_changes_parameters": "checks.asserts",
    "cached": "checkpoint.cache",
    "check": "checks.runner.run",
    "check_returns": "checks.returns",
    "compare_reports": "report.compare",
    "load_checkpoint": "checkpoint",
    "loss_balance": "callbacks.losses.terms",
    "read_report": "report.file",
    "read_run": "report.run_log",
    "replay": "blackbox.replay",
    "save_checkpoint": "checkpoint",
    "stages": "runtime.data_stages",
    "stamp_cache": "checkpoint.cache",
    "tokenizer_digest": "checkpoint.fingerprint",
    "verify_cache": "checkpoint.cache",
}

__all__ = [
    "Action",
    "AttentionCalls",
    "AutocastUse",
    "BlindError",
    "Change",
    "CheckFailed",
    "CheckResult",
    "CheckpointError",
    "CheckpointFingerprint",
    "ConsoleSink",
    "DataError",
    "DataWatch",
    "EvalModeAssert",
    "Finding",
    "Fingerprint",
    "FingerprintMismatch",
    "FiniteGuard",
    "FirstLook",
    "FreezeInTrain",
    "GradNormMonitor",
    "GradientError",
    "Guard",
    "GuardError",
    "GuardUsageError",
    "Guardian",
    "IndexCalls",
    "JsonlSink",
    "LRTracker",
    "LoadedCheckpoint",
    "LoggedLoss",
    "LoggedUpdate",
    "LoopOrder",
    "LossBalance",
    "LossInputs",
    "ModeError",
    "ModelProbe",
    "Moment",
    "NonFiniteError",
    "Observation",
    "ParamDeltaProbe",
    "PreflightError",
    "PreflightReport",
    "ProcessError",
    "Recomputed",
    "ReplicaSync",
    "Report",
    "RestoreWatch",
    "RunLog",
    "ScheduleError",
    "Severity",
    "Sink",
    "TiedWeights",
    "UpdateError",
    "assert_batch_independent",
    "assert_causal",
    "assert_checkpoint_roundtrip",
    "assert_eval_deterministic",
    "assert_gradients_reach_all",
    "assert_ids_in_range",
    "assert_initial_loss",
    "assert_overfits",
    "assert_returns",
    "assert_roundtrip",
    "assert_shifted",
    "assert_step_changes_parameters",
    "cached",
    "check",
    "check_returns",
    "compare_reports",
    "load_checkpoint",
    "loss_balance",
    "read_report",
    "read_run",
    "replay",
    "save_checkpoint",
    "stages",
    "stamp_cache",
    "tokenizer_digest",
    "verify_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
