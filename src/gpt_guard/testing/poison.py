"""Put one number into a tensor, or into the first float tensor of a nested structure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt_guard.errors import GuardUsageError


@torch.no_grad()
def plant(tensor: Tensor, value: float) -> Tensor:
    """Write a number into the first element, in place, and return the tensor."""
    tensor.detach()[(0,) * tensor.dim()] = value
    return tensor


def poisoned(structure: Any, value: float, described: str) -> Any:
    """The same structure with the number in the first element of its first float tensor; gradients still flow.

    Raises GuardUsageError if it holds no float tensor.
    """
    broken, found = _replace(structure, value)
    if not found:
        raise GuardUsageError(f"the {described} holds no float tensor, and only those can be NaN or infinite")
    return broken


def _replace(part: Any, value: float) -> tuple[Any, bool]:
    if isinstance(part, Tensor):
        if not part.is_floating_point() or part.numel() == 0:
            return part, False
        chosen = torch.zeros(part.shape, dtype=torch.bool, device=part.device)
        chosen[(0,) * part.dim()] = True
        # where, not a write: the graph below stays as it is, and a view or a leaf is no obstacle.
        return torch.where(chosen, value, part).to(part.dtype), True
    if isinstance(part, Mapping):
        return _replace_in_mapping(part, value)
    if isinstance(part, (tuple, list)):
        return _replace_in_sequence(part, value)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            broken, found = _replace(getattr(part, field.name), value)
            if found:
                return dataclasses.replace(part, **{field.name: broken}), True
    return part, False


def _replace_in_mapping(part: Mapping[Any, Any], value: float) -> tuple[Any, bool]:
    for key, inner in part.items():
        broken, found = _replace(inner, value)
        if found:
            changed: Any = copy.copy(part)
            changed[key] = broken
            return changed, True
    return part, False


def _replace_in_sequence(part: Any, value: float) -> tuple[Any, bool]:
    for place, inner in enumerate(part):
        broken, found = _replace(inner, value)
        if found:
            changed = [*part[:place], broken, *part[place + 1 :]]
            return part._make(changed) if hasattr(part, "_make") else type(part)(changed), True
    return part, False
