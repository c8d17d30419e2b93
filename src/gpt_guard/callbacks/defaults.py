"""The guards that Guardian uses when it is told nothing."""

from __future__ import annotations

from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.eval_mode import EvalModeAssert
from gpt_guard.callbacks.fingerprint import CheckpointFingerprint
from gpt_guard.callbacks.finite import FiniteGuard
from gpt_guard.callbacks.grad_norm import GradNormMonitor
from gpt_guard.callbacks.logged_update import LoggedUpdate
from gpt_guard.callbacks.lr import LRTracker
from gpt_guard.callbacks.param_delta import ParamDeltaProbe


def default_guards(tokenizer: Any = None, config: Any = None) -> list[Guard]:
    """A new default set; FiniteGuard first, so that what it stops is judged by no other guard."""
    return [
        FiniteGuard(),
        GradNormMonitor(),
        ParamDeltaProbe(),
        LRTracker(),
        EvalModeAssert(),
        LoggedUpdate(),
        CheckpointFingerprint(tokenizer=tokenizer, config=config),
    ]
