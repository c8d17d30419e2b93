"""Keeper: holds the values of a model, an optimizer or a tensor, and what they are made of, and puts them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.resets import reset_of

Undo = Callable[[], object]
_STATELESS = frozenset({int, float, complex, bool, str, bytes, type(None)})


class Keeper:
    """Walks through what it is given once, each object once, so that tied weights are copied once.

    Containers and attributes are put back before tensors: a parameter that a check replaced must be in its place again
    before its values are written. With `weights=False` the values of parameters are trusted to stay as they are, and
    not copied: for what only runs a model.
    """

    def __init__(self, *, weights: bool = True) -> None:
        self._weights = weights
        self._seen: dict[int, Any] = {}  # holds the objects: an id is only good while its object lives
        self._structure: list[Undo] = []
        self._values: list[Undo] = []
        self._gradients: list[Undo] = []  # last: a gradient must have its parameter's dtype and device again

    def keep(self, value: Any) -> None:
        """Hold a value: its tensors by a copy, its containers and modules by what is in them."""
        pending = deque([value])  # not recursive: a model can be deeper than Python's stack
        while pending:
            one = pending.popleft()
            if id(one) not in self._seen and (inside := self._hold(one)) is not None:
                self._seen[id(one)] = one
                # A vocabulary or a data set has millions of these.
                pending.extend([each for each in inside if type(each) not in _STATELESS])

    def put_back(self) -> None:
        """Put everything back. Call it under `torch.no_grad()`."""
        for undo in (*self._structure, *self._values, *self._gradients):
            undo()

    def _hold(self, one: Any) -> list[Any] | None:
        """Note how to restore one object, and return what is inside it; None for what has no state to restore."""
        if isinstance(one, Tensor):
            return self._hold_tensor(one)
        if isinstance(one, nn.Module):
            # A scripted module keeps its tensors outside of its `__dict__`.
            tensors = [*one.parameters(recurse=False), *one.buffers(recurse=False)]
            return [*self._hold_mapping(vars(one)), *tensors]
        if isinstance(one, Optimizer):
            return self._hold_mapping(vars(one))
        if isinstance(one, dict):
            return self._hold_mapping(one)
        if isinstance(one, (list, deque)):
            return self._hold_items(one)
        if isinstance(one, set):
            return self._hold_set(one)
        if isinstance(one, tuple):
            return list(one)
        if (reset := reset_of(one)) is None:
            return None
        self._values.append(reset)
        return []

    def _hold_mapping(self, mapping: dict[Any, Any]) -> list[Any]:
        held = dict(mapping)

        def undo() -> None:
            for key in [key for key in mapping if key not in held]:
                del mapping[key]
            mapping.update(held)
            # Insertion order is the order of a module's parameters. By identity: keys of optimizer state are tensors.
            if list(map(id, mapping)) != list(map(id, held)):
                for key, value in held.items():
                    del mapping[key]  # one at a time: an object's own dict is never empty
                    mapping[key] = value

        self._structure.append(undo)
        return list(held.values())

    def _hold_items(self, items: Any) -> list[Any]:
        held = list(items)

        def undo() -> None:
            items.clear()
            items.extend(held)

        self._structure.append(undo)
        return held

    def _hold_set(self, items: set[Any]) -> list[Any]:
        held = set(items)

        def undo() -> None:
            items.clear()
            items.update(held)

        self._structure.append(undo)
        return []

    def _hold_tensor(self, tensor: Tensor) -> list[Any]:
        if is_lazy(tensor):
            raise GuardUsageError(
                "the model has lazy parameters, whose first forward cannot be undone; run one forward, then check"
            )
        # `data` may be replaced by a check (a cast, a move): the storage is put back, then its values.
        storage, place, requires_grad = tensor.data, _place(tensor), tensor.requires_grad
        trusted = not self._weights and isinstance(tensor, nn.Parameter)
        values = storage if trusted else _distinct(storage).clone()
        grad = tensor.grad if tensor.is_leaf else None

        def undo() -> None:
            if tensor.is_leaf:
                tensor.grad = None
            if tensor.layout is not torch.strided:
                tensor.data = values  # indices have changed, too; elements alone cannot be copied
                return
            if _place(tensor) != place:
                tensor.data = storage
            if not trusted:
                # Written through `data`, so that a graph the user still holds is not told of a change.
                _distinct(tensor.data).copy_(values)

        def undo_gradient() -> None:
            if tensor.is_leaf:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                tensor.grad = grad

        self._values.append(undo)
        self._gradients.append(undo_gradient)
        return [] if grad is None else [grad]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's elements lie; of one that is not strided, only what it looks like."""
    strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    memory = (tensor.data_ptr(), tensor.stride()) if strided else ()
    return (*memory, tensor.shape, tensor.dtype, tensor.device)


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor without the repeats of `expand`: torch refuses to write to one place in memory twice."""
    if tensor.layout is torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dimension) > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor
