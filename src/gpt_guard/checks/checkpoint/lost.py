"""What a model has beside its `state_dict`: tensors, layers and numbers that saving it would lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.forms import plain_device

_REGISTRIES = frozenset(vars(nn.Module()))
_MAX_DEPTH = 4
_MOST_ITEMS = 1000
_NUMBERS = (bool, int, float, str, type(None))


@dataclass
class Lost:
    """One thing that differs between a model and its reload: where it is, what it is, and which cause that is."""

    name: str
    cause: str
    what: str
    module: nn.Module
    attribute: str
    value: Any
    is_buffer: bool = False

    def put(self) -> None:
        """Give the reloaded model the value that the first one has."""
        if self.is_buffer:
            self.module._buffers[self.attribute] = self.value
        else:
            vars(self.module)[self.attribute] = self.value


def lost(model: nn.Module, reloaded: nn.Module) -> list[Lost]:
    """Everything outside of the `state_dict` that differs in value, layers first, then tensors, then numbers.

    Reads the device.
    """
    found = []
    others = dict(reloaded.named_modules())
    for path, module in model.named_modules():
        if (other := others.get(path)) is not None:
            found += [*_buffers(path, module, other), *_attributes(path, module, other)]
    order = ("list", "attribute", "buffer", "number")
    return sorted(found, key=lambda one: order.index(one.cause))


def unsaved(model: nn.Module) -> dict[str, list[Tensor]]:
    """Floating-point tensors that plain attributes hold and no `state_dict` entry does, by the attribute's path."""
    saved = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, list[Tensor]] = {}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _REGISTRIES:
                inside = [t for t in tensors_in(value) if id(t) not in saved and t.is_floating_point()]
                if inside:
                    found[_join(path, attribute)] = inside
    return found


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value: of modules in it, and of lists, tuples, sets and dicts, nested a few levels deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth < _MAX_DEPTH and isinstance(value, (list, tuple, set, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        for place, item in enumerate(items):
            if place < _MOST_ITEMS:
                yield from tensors_in(item, depth + 1)


def kind_of(value: Any) -> str:
    """What an attribute is, in words: `a list of 2 Block`."""
    if isinstance(value, (list, tuple, set, Mapping)):
        items = list(value.values() if isinstance(value, Mapping) else value)
        kinds = {type(item).__name__ for item in items}
        return f"a {type(value).__name__} of {len(items)} {kinds.pop() if len(kinds) == 1 else 'items'}"
    return "a plain tensor" if isinstance(value, Tensor) else f"a {type(value).__name__} set past nn.Module"


def _attributes(path: str, module: nn.Module, other: nn.Module) -> Iterator[Lost]:
    theirs = vars(other)
    for attribute, value in vars(module).items():
        if attribute in _REGISTRIES:
            continue
        name, then = _join(path, attribute), theirs.get(attribute)
        mine = list(tensors_in(value))
        if mine:
            if not _same(mine, list(tensors_in(then))):
                cause = "attribute" if isinstance(value, Tensor) else "list"
                yield Lost(name, cause, kind_of(value), other, attribute, value)
        elif isinstance(value, _NUMBERS) and isinstance(then, _NUMBERS) and value != then:
            yield Lost(name, "number", f"{value!r}, after the reload {then!r}", other, attribute, value)


def _buffers(path: str, module: nn.Module, other: nn.Module) -> Iterator[Lost]:
    for attribute in module._non_persistent_buffers_set:
        mine, theirs = module._buffers.get(attribute), other._buffers.get(attribute)
        if mine is not None and (theirs is None or not _same([mine], [theirs])):
            shape = "x".join(map(str, mine.shape)) or "scalar"
            what = f"a buffer [{shape}] with persistent=False"
            yield Lost(_join(path, attribute), "buffer", what, other, attribute, mine, is_buffer=True)


def _same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(plain_device(one), plain_device(other))


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
