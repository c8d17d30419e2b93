"""Save an optimizer's state, load it again, and compare it entry by entry: values, dtypes and devices."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import Task
from gpt_guard.checks.runner.forward import plain_device
from gpt_guard.hooks.optimizer import unwrap as plain_optimizers
from gpt_guard.records import Finding


def with_state(model: nn.Module, optimizer: Optimizer, task: Task | None) -> str | None:
    """Make one step where the optimizer has no state yet; return why that cannot be, or None.

    Changes the model and the optimizer: keep both.
    """
    if optimizer.state:
        return None
    if task is None:
        return "it has no state yet, and there is no batch to make a step with"
    optimizer.zero_grad(set_to_none=True)
    task.loss(model).backward()
    optimizer.step()
    return None if optimizer.state else f"a {type(optimizer).__name__} keeps no state"


def optimizer_reload(optimizer: Optimizer) -> tuple[int, Finding | None]:
    """The number of state tensors, and GG721 where one is lost, changed, or lies on another device after the load.

    The state goes through the bytes that `torch.save` writes and comes back by way of the CPU, as from a file.
    Changes the optimizer: keep it.
    """
    total = 0
    for one in plain_optimizers(optimizer):
        before = _entries(one)
        total += sum(isinstance(value, Tensor) for value in before.values())
        try:
            stream = io.BytesIO()
            torch.save(one.state_dict(), stream)
            stream.seek(0)
            state = torch.load(stream, map_location="cpu", weights_only=True)
            one.state.clear()
            one.load_state_dict(state)
        except Exception as error:  # an optimizer of the user's own may raise anything
            words = " ".join(str(error).split())[:200]
            seen = f"{type(one).__name__}: its state cannot be saved and loaded: {type(error).__name__}: {words}"
            return total, finding("GG721", seen, likely=["raised"])
        if (found := next(_changes(one, before), None)) is not None:
            return total, found
    return total, None


def _entries(optimizer: Optimizer) -> dict[tuple[str, str], Any]:
    """Each entry by the place of its parameter; tensors are copied, for loading may write into them."""
    places = {
        id(parameter): f"parameter {place} of group {index}"
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }
    return {
        (places.get(id(parameter), "no parameter"), str(key)): value.clone() if isinstance(value, Tensor) else value
        for parameter, state in optimizer.state.items()
        if isinstance(state, dict)
        for key, value in state.items()
    }


def _changes(optimizer: Optimizer, before: dict[tuple[str, str], Any]) -> Iterator[Finding]:
    after, kind = _entries(optimizer), type(optimizer).__name__
    for (where, key), old in before.items():
        new = after.get((where, key))
        what = f"{kind}: {key} of {where}"
        if new is None and old is not None:
            yield finding("GG721", f"{what} is gone after save and load", likely=["dropped"])
        elif isinstance(old, Tensor) and isinstance(new, Tensor):
            if new.device != old.device and old.dim():
                seen = f"{what} lies on {new.device} after the load, before on {old.device}"
                yield finding("GG721", seen, likely=["device"])
            elif new.shape != old.shape or not torch.equal(plain_device(new).to(old.dtype), plain_device(old)):
                likely = ["cast"] if new.dtype != old.dtype else ["dropped"]
                dtypes = f" ({old.dtype} before, {new.dtype} after)" if new.dtype != old.dtype else ""
                yield finding("GG721", f"{what} has other values after save and load{dtypes}", likely=likely)
        elif not isinstance(old, Tensor) and not _equal(old, new):
            seen = f"{what} was {str(old)[:60]}, is {str(new)[:60]} after save and load"
            yield finding("GG721", seen, likely=["dropped"])


def _equal(old: Any, new: Any) -> bool:
    try:
        return bool(old == new)
    except Exception:  # lists of tensors compare to no single truth; their parts were compared by whoever made them
        return True
