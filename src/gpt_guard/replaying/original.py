"""The model that is run again: what a wrapper wraps, and whether one process can run it alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gpt_guard.hooks.compiled import is_compiled_in_place, is_compiled_wrapper

_MOST_WRAPPERS = 4


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module behind `torch.compile`, DataParallel and DistributedDataParallel; the model itself otherwise."""
    for _ in range(_MOST_WRAPPERS):
        inner: nn.Module | None = None
        if is_compiled_wrapper(model):
            inner = model.get_submodule("_orig_mod")
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model runs compiled: the replay runs it eagerly."""
    return any(is_compiled_wrapper(module) or is_compiled_in_place(module) for module in model.modules())


def why_not(model: nn.Module) -> str | None:
    """Why this model cannot be run by one process alone, as a sentence; None if it can."""
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "Not replayed: the parameters are sharded, and a forward of one process alone would wait for the others."
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "Not replayed: the model is sharded, and a forward of one process alone would wait for the others."
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    waits = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if waits and several and torch.distributed.get_world_size() > 1:
        return "Not replayed: SyncBatchNorm waits for all processes, and only this one has failed."
    return None


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path of the model as it was given; the plain module for the model itself."""
    if not path:
        return unwrapped(model)
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
