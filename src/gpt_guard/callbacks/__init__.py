"""The guards, one idea each."""

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.eval_mode import EvalModeAssert
from gpt_guard.callbacks.fingerprint import CheckpointFingerprint
from gpt_guard.callbacks.finite import FiniteGuard
from gpt_guard.callbacks.grad_norm import GradNormMonitor
from gpt_guard.callbacks.logged_update import LoggedUpdate
from gpt_guard.callbacks.lr import LRTracker
from gpt_guard.callbacks.param_delta import ParamDeltaProbe

__all__ = [
    "CheckpointFingerprint",
    "EvalModeAssert",
    "FiniteGuard",
    "GradNormMonitor",
    "Guard",
    "LRTracker",
    "LoggedUpdate",
    "ParamDeltaProbe",
]
