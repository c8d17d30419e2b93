"""The guards, one idea each."""

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
from gpt_guard.callbacks.modes.frozen import FreezeInTrain
from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.callbacks.modes.recomputed import Recomputed
from gpt_guard.callbacks.precision.autocast import AutocastUse
from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.callbacks.schedule.guard import LRTracker
from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.callbacks.updates.tied import TiedWeights

__all__ = [
    "AttentionCalls",
    "AutocastUse",
    "CheckpointFingerprint",
    "DataWatch",
    "EvalModeAssert",
    "FiniteGuard",
    "FirstLook",
    "FreezeInTrain",
    "GradNormMonitor",
    "Guard",
    "IndexCalls",
    "LRTracker",
    "LoggedLoss",
    "LoggedUpdate",
    "LoopOrder",
    "LossInputs",
    "ModelProbe",
    "ParamDeltaProbe",
    "Recomputed",
    "ReplicaSync",
    "RestoreWatch",
    "TiedWeights",
]
