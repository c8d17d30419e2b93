"""The guards that Guardian uses when it is told nothing."""

from __future__ import annotations

from typing import Any

from gpt_guard.callbacks.attention.embedding import IndexCalls
from gpt_guard.callbacks.attention.guard import AttentionCalls
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.checkpointing.fingerprint import CheckpointFingerprint
from gpt_guard.callbacks.checkpointing.restore import RestoreWatch
from gpt_guard.callbacks.data.guard import DataWatch
from gpt_guard.callbacks.finite.guard import FiniteGuard
from gpt_guard.callbacks.first_look.guard import FirstLook
from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.callbacks.logged.guards import LoggedLoss, LoggedUpdate
from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.callbacks.losses.guard import LossInputs
from gpt_guard.callbacks.modes.frozen import FreezeInTrain
from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.callbacks.modes.recomputed import Recomputed
from gpt_guard.callbacks.precision.autocast import AutocastUse
from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.callbacks.schedule.guard import LRTracker
from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.callbacks.updates.tied import TiedWeights


def default_guards(tokenizer: Any = None, config: Any = None) -> list[Guard]:
    """A new default set; FiniteGuard first, so that what it stops is judged by no other guard."""
    return [
        FiniteGuard(),
        FirstLook(),
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
        Recomputed(),
        RestoreWatch(),
        CheckpointFingerprint(tokenizer=tokenizer, config=config),
    ]
