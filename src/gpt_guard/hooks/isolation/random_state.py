"""Random number generators: hold, put back and seed all that a model or a data pipeline draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The states of torch (CPU and accelerators), Python and, if it is loaded, numpy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` held."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state:
        torch.mps.set_rng_state(state["mps"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def seed_all(seed: int) -> None:
    """Seed the same generators, so that a check gives the same answer every time."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
