"""State that a forward keeps in its modules from one call to the next: what a replay cannot take back to the start."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gpt_guard.hooks.tensors import readable, version_of, watchable

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
# What nn.Module itself keeps: registered tensors and modules, hooks, and the mode.
REGISTRIES = frozenset(vars(nn.Module()))
_PLAIN = (int, float, str, bool, type(None))


def lend_copies(model: nn.Module) -> None:
    """Give each module copies of the containers in its attributes, the same copy where it was the same container.

    A forward that is halted may be going through one of them: it must not be written to, not even to be put back.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if type(value) in _CONTAINERS and name not in REGISTRIES:
                if id(value) not in copies:
                    copies[id(value)] = copy.copy(value)
                attributes[name] = copies[id(value)]


class OwnState:
    """Buffers and attributes as they are now; `changed` names those that are not so any more."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[Any] = []  # an id is only good while its object lives
        self._before = dict(self._state())

    def changed(self) -> list[str]:
        """Names of buffers and attributes that have been written to since, in the order of modules."""
        now = dict(self._state())
        return [name for name, value in self._before.items() if now.get(name) != value]

    def _state(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for name, buffer in module._buffers.items():
                yield f"{prefix}{name}", self._key(buffer)
            for name, value in vars(module).items():
                if name not in REGISTRIES:
                    yield f"{prefix}{name}", self._key(value)

    def _key(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        self._held.append(value)
        if isinstance(value, Tensor):
            # BatchNorm writes to its statistics without counting it.
            return id(value), version_of(value), _total(value)
        if type(value) in _CONTAINERS:
            inside = value.values() if isinstance(value, dict) else value
            self._held.extend(inside)
            return tuple(map(id, inside))
        return id(value)


def _total(tensor: Tensor) -> float | None:
    values = readable(tensor) if watchable(tensor) else None
    total = None if values is None else float(values.double().sum())
    return None if total != total else total
