"""Run a model without leaving a trace: everything that may change is put back, on every way out."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gpt_guard.errors import GuardUsageError

Undo = Callable[[], object]
_STATELESS = frozenset({int, float, complex, bool, str, bytes, type(None)})
# An array of numpy that counts or averages is small; one that holds data is only read.
_MOST_BYTES = 16 * 2**20


@contextmanager
def preserved(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    tensors: Iterable[Tensor] = (),
    *,
    weights: bool = True,
) -> Iterator[None]:
    """Restore parameters, buffers, gradients, optimizer state, modes, RNG (torch, Python, numpy if loaded) and tensors.

    Bit-identical afterwards and the same objects, also after an exception or Ctrl-C: parameters keep their storage,
    tied weights stay tied, optimizer state that a check created is gone. Plain attributes of modules (counters, caches,
    hooks) are put back, too. The model itself is used rather than a deep copy, which could not carry hooks, tied
    weights of the optimizer or what a wrapper (DDP, `torch.compile`) holds. Costs one copy of all tensors; with
    `weights=False`, for what runs a model and does not write to its parameters, theirs are not copied. A random
    generator that the user's own data loading holds is theirs: it advances where batches are drawn.
    """
    random = random_state()
    keeper = Keeper(weights=weights)
    for part in (model, optimizer, *tensors):
        if part is not None:
            keeper.keep(part)
    try:
        yield
    finally:
        with torch.no_grad():
            keeper.put_back()
        restore_random_state(random)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradient; each module gets its own mode back, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def random_state() -> dict[str, Any]:
    """The states of torch (CPU and accelerators), Python and, if it is loaded, numpy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), **python_random_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def python_random_state() -> dict[str, Any]:
    """The states of Python and, if it is loaded, numpy."""
    state: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what either of these held."""
    random.setstate(state["python"])
    if "torch" in state:
        torch.set_rng_state(state["torch"])
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


class Keeper:
    """Walks through what it is given once, each object once, so that tied weights are copied once.

    Containers and attributes are put back before tensors: a parameter that a check replaced must be in its place again
    before its values are written. Containers that nothing has changed are not written to: a loop of the user's may be
    going through one. With `weights=False` the values of parameters are trusted to stay as they are, and not copied:
    for what only runs a model. Of plain objects, such as caches and counters, as many as `objects` are gone through.
    """

    def __init__(self, *, weights: bool = True, objects: int = 0) -> None:
        self._weights = weights
        self._objects = objects
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
        if (reset := reset_of(one)) is not None:
            self._values.append(reset)
            return []
        if self._objects and is_plain_object(one):
            self._objects -= 1
            return self._hold_mapping(vars(one))
        return None

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
            if list(map(id, items)) != list(map(id, held)):
                items.clear()
                items.extend(held)

        self._structure.append(undo)
        return held

    def _hold_set(self, items: set[Any]) -> list[Any]:
        held = set(items)

        def undo() -> None:
            if set(map(id, items)) != set(map(id, held)):
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


def is_plain_object(value: Any) -> bool:
    """An object of a class that is neither torch's nor Python's: a cache, a counter, a config."""
    home = type(value).__module__.partition(".")[0]
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or home in (*sys.stdlib_module_names, "torch"):
        return False
    return hasattr(value, "__dict__")


def reset_of(value: Any) -> Callable[[], object] | None:
    """What puts a generator of random numbers, or an array of numpy that is not large, back to what it is now.

    None for anything else.
    """
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        if bits is not None:
            numbers = bits.state
            return lambda: setattr(bits, "state", numbers)
    if type(value).__module__ == "numpy" and getattr(value, "nbytes", _MOST_BYTES) < _MOST_BYTES and value.ndim:
        return partial(_write, value, value.copy())
    return None


def _write(array: Any, values: Any) -> None:
    if array.flags.writeable:
        array[...] = values
