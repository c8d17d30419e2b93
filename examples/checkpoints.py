"""Checkpoints of the example: plain `torch.save`, written whole or not at all, and enough in them to go on exactly.

A new run never writes over another one.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

KEYS = {
    "config",
    "model_state_dict",
    "optimizer_state_dict",
    "scheduler_state_dict",
    "step",
    "tokenizer_fingerprint",
    "random_state",
    "best_val_loss",
    "settings",
}


class CheckpointProblem(Exception):
    """A checkpoint that cannot be gone on from; the message names the file and the remedy."""


def unused_folder(wanted: Path) -> Path:
    """The folder itself, or the first of `wanted-2`, `wanted-3`, ... in which no run has left anything."""
    folder, number = wanted, 1
    while (folder / "steps.jsonl").exists() or any((folder / "checkpoints").glob("*.pt")):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    if folder != wanted:
        print(f"{wanted} holds a run already: this one goes to {folder} (--resume goes on with the old one)")
    return folder


def save_atomically(content: object, path: Path) -> None:
    """Write with `torch.save` under a temporary name first, so that a killed run never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def load_for_resume(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU, as data only. Raises CheckpointProblem when there is none to go on from."""
    if not path.is_file():
        raise CheckpointProblem(f"{path}: no checkpoint to resume from. Run once without --resume, or check --out.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise CheckpointProblem(
            f"{path}: damaged or not a checkpoint ({why}). Start again without --resume."
        ) from error
    missing = KEYS - checkpoint.keys() if isinstance(checkpoint, dict) else KEYS
    if missing:
        raise CheckpointProblem(f"{path}: lacks {', '.join(sorted(missing))}; it was not written by this script.")
    return dict(checkpoint)


def random_state(order: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """The states of everything that draws: the order of the data, dropout on the CPU, dropout on the device."""
    state = {"order": order.get_state(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor], order: torch.Generator, device: torch.device) -> None:
    """Take back what `random_state` gave; a device that the first run did not use keeps its own state."""
    order.set_state(state["order"])
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
