"""The guards that Guardian uses when it is told nothing."""

from __future__ import annotations

from typing import Any

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
from gpt_guard.callbacks.loss_inputs import LossInputs
from gpt_guard.callbacks.lr import LRTracker
from gpt_guard.callbacks.model_probe import ModelProbe
from gpt_guard.callbacks.param_delta import ParamDeltaProbe
from gpt_guard.callbacks.tied import TiedWeights


def default_guards(tokenizer: Any = None, config: Any = None) -> list[Guard]:
    """A new default set; FiniteGuard first, so that what it stops is judged by no other guard."""
    return [
        FiniteGuard(),
        LoopOrder(),
        LossInputs(),
        GradNormMonitor(),
        ParamDeltaProbe(),
        TiedWeights(),
        LRTracker(),
        EvalModeAssert(),
        IndexCalls(),
        AttentionCalls(),
        ModelProbe(),
        DataWatch(),
        LoggedLoss(),
        LoggedUpdate(),
        FreezeInTrain(),
        AutocastUse(),
        CheckpointFingerprint(tokenizer=tokenizer, config=config),
    ]
