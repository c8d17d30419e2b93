"""What a save or load is given first: a path and a model, in this order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from gpt_guard.errors import GuardUsageError


def checked_path(call: str, path: Any, model: Any) -> Path:
    """The path of a file, if the arguments are what they should be. Raises GuardUsageError."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        swapped = ": path and model are swapped" if isinstance(path, nn.Module) else ""
        given = "empty" if path == "" else f"a {type(path).__name__}{swapped}"
        raise GuardUsageError(f'path is {given}. Write {call}("checkpoint.pt", model, optimizer)')
    if not isinstance(model, nn.Module):
        raise GuardUsageError(
            f"model is a {type(model).__name__}, no torch.nn.Module. Write {call}(path, model, optimizer)"
        )
    return Path(path)
