"""gpt_guard: flight instruments for a PyTorch training loop.

Names are loaded when they are first used, so that reading a run log or explaining a finding does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_guard.blackbox.again import replay
    from gpt_guard.cache import cached, stamp_cache, verify_cache
    from gpt_guard.callbacks.attention_calls import AttentionCalls
    from gpt_guard.callbacks.autocast import AutocastUse
    from gpt_guard.callbacks.base import Guard
    from gpt_guard.callbacks.data_watch import DataWatch
    from gpt_guard.callbacks.eval_mode import EvalModeAssert
    from gpt_guard.callbacks.fingerprint import CheckpointFingerprint
    from gpt_guard.callbacks.finite import FiniteGuard
    from gpt_guard.callbacks.freezing import FreezeInTrain
    from gpt_guard.callbacks.grad_norm import GradNormMonitor
    from gpt_guard.callbacks.index_calls import IndexCalls
    from gpt_guard.callbacks.logged_loss import LoggedLoss
    from gpt_guard.callbacks.logged_update import LoggedUpdate
    from gpt_guard.callbacks.loop_order import LoopOrder
    from gpt_guard.callbacks.loss_balance import LossBalance, loss_balance
    from gpt_guard.callbacks.loss_inputs import LossInputs
    from gpt_guard.callbacks.lr import LRTracker
    from gpt_guard.callbacks.model_probe import ModelProbe
    from gpt_guard.callbacks.param_delta import ParamDeltaProbe
    from gpt_guard.callbacks.replicas import ReplicaSync
    from gpt_guard.callbacks.tied import TiedWeights
    from gpt_guard.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
    from gpt_guard.checks.asserts import CheckFailed
    from gpt_guard.checks.asserts_checkpoint import assert_checkpoint_roundtrip
    from gpt_guard.checks.asserts_data import assert_ids_in_range, assert_roundtrip, assert_shifted
    from gpt_guard.checks.asserts_model import (
        assert_batch_independent,
        assert_causal,
        assert_eval_deterministic,
        assert_initial_loss,
    )
    from gpt_guard.checks.asserts_returns import assert_returns
    from gpt_guard.checks.asserts_training import (
        assert_gradients_reach_all,
        assert_overfits,
        assert_step_changes_parameters,
    )
    from gpt_guard.checks.report import PreflightReport
    from gpt_guard.checks.run import check
    from gpt_guard.compare import Change, compare_reports
    from gpt_guard.data_stages import stages
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
    from gpt_guard.fingerprint import Fingerprint, tokenizer_digest
    from gpt_guard.guardian import Guardian
    from gpt_guard.records import Action, CheckResult, Finding, Moment, Observation, Report, Severity
    from gpt_guard.report_file import read_report
    from gpt_guard.returns import check_returns
    from gpt_guard.runlog import RunLog, read_run
    from gpt_guard.sinks.base import Sink
    from gpt_guard.sinks.console import ConsoleSink
    from gpt_guard.sinks.jsonl import JsonlSink

_HOME = {
    "Action": "records",
    "AttentionCalls": "callbacks.attention_calls",
    "AutocastUse": "callbacks.autocast",
    "BlindError": "errors",
    "Change": "compare",
    "CheckFailed": "checks.asserts",
    "CheckResult": "records",
    "CheckpointError": "errors",
    "CheckpointFingerprint": "callbacks.fingerprint",
    "ConsoleSink": "sinks.console",
    "DataError": "errors",
    "DataWatch": "callbacks.data_watch",
    "EvalModeAssert": "callbacks.eval_mode",
    "Finding": "records",
    "Fingerprint": "fingerprint",
    "FingerprintMismatch": "errors",
    "FiniteGuard": "callbacks.finite",
    "FreezeInTrain": "callbacks.freezing",
    "GradNormMonitor": "callbacks.grad_norm",
    "GradientError": "errors",
    "Guard": "callbacks.base",
    "GuardError": "errors",
    "GuardUsageError": "errors",
    "Guardian": "guardian",
    "IndexCalls": "callbacks.index_calls",
    "JsonlSink": "sinks.jsonl",
    "LRTracker": "callbacks.lr",
    "LoadedCheckpoint": "checkpoint",
    "LoggedLoss": "callbacks.logged_loss",
    "LoggedUpdate": "callbacks.logged_update",
    "LoopOrder": "callbacks.loop_order",
    "LossBalance": "callbacks.loss_balance",
    "LossInputs": "callbacks.loss_inputs",
    "ModeError": "errors",
    "ModelProbe": "callbacks.model_probe",
    "Moment": "records",
    "NonFiniteError": "errors",
    "Observation": "records",
    "ParamDeltaProbe": "callbacks.param_delta",
    "PreflightError": "errors",
    "PreflightReport": "checks.report",
    "ProcessError": "errors",
    "ReplicaSync": "callbacks.replicas",
    "Report": "records",
    "RunLog": "runlog",
    "ScheduleError": "errors",
    "Severity": "records",
    "Sink": "sinks.base",
    "TiedWeights": "callbacks.tied",
    "UpdateError": "errors",
    "assert_batch_independent": "checks.asserts_model",
    "assert_causal": "checks.asserts_model",
    "assert_checkpoint_roundtrip": "checks.asserts_checkpoint",
    "assert_eval_deterministic": "checks.asserts_model",
    "assert_gradients_reach_all": "checks.asserts_training",
    "assert_ids_in_range": "checks.asserts_data",
    "assert_initial_loss": "checks.asserts_model",
    "assert_overfits": "checks.asserts_training",
    "assert_returns": "checks.asserts_returns",
    "assert_roundtrip": "checks.asserts_data",
    "assert_shifted": "checks.asserts_data",
    "assert_step_changes_parameters": "checks.asserts_training",
    "cached": "cache",
    "check": "checks.run",
    "check_returns": "returns",
    "compare_reports": "compare",
    "load_checkpoint": "checkpoint",
    "loss_balance": "callbacks.loss_balance",
    "read_report": "report_file",
    "read_run": "runlog",
    "replay": "blackbox.again",
    "save_checkpoint": "checkpoint",
    "stages": "data_stages",
    "stamp_cache": "cache",
    "tokenizer_digest": "fingerprint",
    "verify_cache": "cache",
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
    "ReplicaSync",
    "Report",
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
