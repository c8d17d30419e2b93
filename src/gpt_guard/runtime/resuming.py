"""What a resumed run goes on from: the stamp of a checkpoint, and the state of Guardian and its guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.checkpointing.fingerprint import CheckpointFingerprint
from gpt_guard.runtime.progress import Progress


def stamp_of(guards: Sequence[Guard], belongings: dict[str, Any]) -> dict[str, Any]:
    """What the run belongs to: what a CheckpointFingerprint among the guards says, or what Guardian was given."""
    stamps = [guard.belongings for guard in guards if isinstance(guard, CheckpointFingerprint)]
    return stamps[0] if stamps else belongings


def state_of(progress: Progress, guards: Sequence[Guard]) -> dict[str, Any]:
    """Plain numbers, loadable with `weights_only=True`."""
    return {"progress": progress.state_dict(), "guards": {guard.name: guard.state_dict() for guard in guards}}


def take_back(state: dict[str, Any], progress: Progress, guards: Sequence[Guard]) -> None:
    """Go on from what `state_of` gave; guards that were not there then start fresh."""
    progress.load_state_dict(state["progress"])
    for guard in guards:
        if guard.name in state["guards"]:
            guard.load_state_dict(state["guards"][guard.name])
