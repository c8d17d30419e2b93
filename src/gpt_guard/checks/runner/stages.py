"""The stages of preflight in the order in which data flows, each loaded from its own file when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from gpt_guard.checks.runner.base import Stage
from gpt_guard.errors import GuardUsageError

_HOMES = {
    "environment": "EnvironmentStage",
    "files": "FilesStage",
    "tokenizer": "TokenizerStage",
    "token_ids": "TokenIdsStage",
    "batches": "BatchesStage",
    "shapes": "ShapesStage",
    "initial_loss": "InitialLossStage",
    "causality": "CausalityStage",
    "gradients": "GradientsStage",
    "optimizer": "OptimizerStage",
    "overfit": "OverfitStage",
    "validation": "ValidationStage",
    "checkpoint": "CheckpointStage",
    "generation": "GenerationStage",
}
NAMES = tuple(module.replace("_", "-") for module in _HOMES)
"""The names of all stages; a stage's number is its place in here, counted from 1."""


def stage(name: str) -> Stage:
    """Return the stage of a name such as "token-ids". Raises KeyError for a name that does not exist."""
    module = name.replace("-", "_")
    kind: type[Stage] = getattr(import_module(f"gpt_guard.checks.{module}.stage"), _HOMES[module])
    return kind()


def heading(name: str) -> str:
    """Number and title of a stage, as a report shows them; only the name for one that this version does not have."""
    return f"{stage(name).number:>2} {title(name)}" if name in NAMES else name


def title(name: str) -> str:
    """The title of a stage; its name for one that this version does not have."""
    return stage(name).title if name in NAMES else name


def select(only: Iterable[str | int] = (), skip: Iterable[str | int] = ()) -> tuple[Stage, ...]:
    """The stages to run: all, or those in `only`, without those in `skip`; each by name or number.

    Raises GuardUsageError for a stage that does not exist, listing those that do, and where none is left.
    """
    wanted, unwanted = set(map(_name, only)), set(map(_name, skip))
    chosen = tuple(stage(name) for name in NAMES if (not wanted or name in wanted) and name not in unwanted)
    if not chosen:
        raise GuardUsageError(f"no stage is left to run: {', '.join(sorted(unwanted))} left out")
    return chosen


def _name(asked: str | int) -> str:
    text = str(asked).strip().lower().replace("_", "-")
    if text.isdecimal() and 1 <= int(text) <= len(NAMES):
        return NAMES[int(text) - 1]
    if text not in NAMES:
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(NAMES, start=1))
        raise GuardUsageError(f"there is no stage {asked!r}; the stages are {listed}")
    return text
