"""Where a module is kept that `eval()` does not reach: the attribute that holds it, and what else is in there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpt_guard.hooks.unregistered import find_hidden
from gpt_guard.hooks.watch import Watch

# What nn.Module itself keeps in its __dict__.
_OWN = frozenset(vars(nn.Module()))
_MOST_ITEMS = 1000
_MAX_DEPTH = 4


class Missed(NamedTuple):
    """The attribute by its full path, what it is (`a list of 3 Block`), whose it is, and its tensors that train.

    `untrained` counts those that no optimizer under watch holds.
    """

    name: str
    kind: str
    owner: str
    tensors: int
    untrained: int


def find_missed(watch: Watch, module: nn.Module) -> Missed | None:
    """The attribute of a registered module that holds this one past torch; None where nobody in the model does."""
    for path, owner in watch.model.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in _OWN:
                continue
            kept = list(_modules(value))
            if any(each is module for each in kept):
                name = f"{path}.{attribute}" if path else attribute
                return _missed(watch, name, type(owner).__name__, value, kept)
    return None


def _missed(watch: Watch, name: str, owner: str, value: Any, kept: list[nn.Module]) -> Missed:
    held = {id(tensor): tensor for each in kept for tensor in each.parameters(recurse=False)}
    registered = {id(tensor) for tensor in watch.model.parameters()}
    tensors = [tensor for key, tensor in held.items() if tensor.requires_grad and key not in registered]
    found = next((hidden for hidden in find_hidden(watch.model, tensors) if hidden.name == name), None)
    kind = found.kind if found is not None else f"a {type(value).__name__}"
    untrained = [tensor for tensor in tensors if not _stepped(watch, tensor)]
    return Missed(name, kind, owner, len(tensors), len(untrained))


def _stepped(watch: Watch, tensor: Tensor) -> bool:
    groups = (group["params"] for optimizer in watch.optimizers for group in optimizer.param_groups)
    return any(each is tensor for group in groups for each in group)


def _modules(value: Any, depth: int = 0) -> Iterator[nn.Module]:
    """The modules in a value, with those inside of them and those that they in turn hold past torch."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, nn.Module):
        for module in value.modules():
            yield module
            for attribute, inner in vars(module).items():
                if attribute not in _OWN:
                    yield from _modules(inner, depth + 1)
    elif isinstance(value, (list, tuple, set, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        for place, item in enumerate(items):
            if place >= _MOST_ITEMS:
                return
            yield from _modules(item, depth + 1)
