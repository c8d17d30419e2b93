"""Leave a model and its loop as they were: what a replay may change is put back, what must not see it is off.

`untouched` holds the model, `outside_the_loop` what the loop has put around its step.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from gpt_guard.hooks.capture.execution_context import SavedHooks, saved_hooks_only
from gpt_guard.hooks.isolation.preserve import Keeper, python_random_state, restore_random_state
from gpt_guard.hooks.isolation.rerun import Consumed, consumed, may_block
from gpt_guard.hooks.tensors import readable, version_of, watchable
from gpt_guard.hooks.unregistered import own_attributes

# Buffers are always copied, parameters and other tensors of modules only up to here: a forward seldom writes to them.
_MOST_BYTES = 256 * 2**20
# Caches and counters are few; a model that holds its trainer, and so all of its data, is not gone through.
_MOST_OBJECTS = 1000
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_PLAIN = (int, float, str, bool, type(None))
_READS: dict[Consumed, frozenset[str]] = {
    "iterator": frozenset({"send", "throw"}),
    "queue": frozenset({"get", "get_nowait", "recv", "recv_bytes", "recv_bytes_into", "join"}),
    "file": frozenset({"read", "read1", "readall", "readinto", "readline", "readlines", "seek"}),
}
_WRITES: dict[Consumed, frozenset[str]] = {
    "iterator": frozenset({"close"}),
    "queue": frozenset({"put", "put_nowait", "send", "send_bytes", "task_done", "close"}),
    "file": frozenset({"write", "writelines", "flush", "truncate", "close"}),
}
# What is longer is data.
_DEEPEST, _LONGEST = 4, 1000


@contextmanager
def untouched(
    model: nn.Module,
    notes: list[str],
    own: list[str],
    *,
    changing: Collection[Tensor] = (),
    given: Any = (),
    live: bool = False,
) -> Iterator[None]:
    """Inside, run the model freely; afterwards nothing of it tells that it ran, whatever was raised.

    Put back: values, identities and version counters of buffers and parameters, gradients (they are set aside, so that
    the same objects return), attributes of modules and of plain objects in them and in what the forward is given, what
    lists, dicts and sets in those held, and the generators of Python and numpy. torch's own are put back by
    `put_into`. What could not be is said in `notes`; state of extension modules is out of reach. Where a loop is
    still running (`live`), iterators, queues and files that modules hold are replaced by stubs meanwhile. `own`
    gets the names of buffers and attributes that what ran has written to: they were not as the first forward found
    them.
    """
    keeper = ForwardKeeper(model, changing, given)
    # Inference tensors count nothing.
    counted = tuple(tensor for tensor in keeper.written if version_of(tensor) >= 0)
    gradients = [(each, each.grad) for each in model.parameters() if each.grad is not None]
    random = python_random_state()
    copy_containers(model)
    if live:
        stub_attributes(model)
    state = OwnState(model)
    try:
        with _unsafe_preserve_version_counter(counted):
            for parameter, _ in gradients:
                parameter.grad = None
            try:
                yield
            finally:
                own += state.changed()
                with torch.no_grad():
                    keeper.put_back()
                for parameter in model.parameters():
                    parameter.grad = None
                for parameter, gradient in gradients:
                    parameter.grad = gradient
    finally:
        if _drawn_since(random):
            notes.append("The step draws from Python's or numpy's generator, whose state at that time is not kept.")
        if keeper.changed():
            notes.append("The forward writes to tensors that are too large to copy: the replay has changed them.")


class ForwardKeeper(Keeper):
    """Holds what a forward may change: buffers, attributes of modules and of plain objects, generators, and parameters.

    `changing` are tensors that are known to be written to and are copied whatever their size; `given` is what the
    forward is called with.
    """

    def __init__(self, model: nn.Module, changing: Collection[Tensor] = (), given: Any = ()) -> None:
        super().__init__(objects=_MOST_OBJECTS)
        self._always = {id(tensor) for tensor in (*model.buffers(), *changing)}
        self._budget = _MOST_BYTES
        self.watched: list[tuple[Tensor, int, int]] = []
        self.written: list[Tensor] = []
        self.keep(model)
        self.keep(given)

    def _hold(self, one: Any) -> list[Any] | None:
        return None if isinstance(one, Optimizer) else super()._hold(one)

    def _hold_tensor(self, tensor: Tensor) -> list[Any]:
        if is_lazy(tensor) or tensor.is_meta or tensor.is_nested:
            return []
        size = tensor.nbytes if tensor.layout is torch.strided else 0
        fixed = tensor.is_inference()  # cannot be written back outside of inference mode
        if fixed or id(tensor) not in self._always:
            if fixed or size > self._budget:
                self.watched.append((tensor, version_of(tensor), tensor.data_ptr()))
                return []
            self._budget -= size
        self.written.append(tensor)
        super()._hold_tensor(tensor)
        return []  # gradients are set aside, not copied

    def changed(self) -> int:
        """How many tensors that were too large to copy have been written to."""
        return sum(
            version_of(tensor) != version or tensor.data_ptr() != place for tensor, version, place in self.watched
        )


def copy_containers(model: nn.Module) -> None:
    """Give each module copies of the containers in its attributes, the same copy where it was the same container.

    A forward that is halted may be going through one of them: it must not be written to, not even to be put back.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in own_attributes(module):
            if type(value) in _CONTAINERS:
                if id(value) not in copies:
                    copies[id(value)] = copy.copy(value)
                vars(module)[name] = copies[id(value)]


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
            for name, value in own_attributes(module):
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


def _drawn_since(before: dict[str, Any]) -> bool:
    """Put the generators of Python and numpy back, and tell whether they were used."""
    now = python_random_state()
    restore_random_state(before)
    return any(pickle.dumps(now[name]) != pickle.dumps(state) for name, state in before.items())


@contextmanager
def outside_the_loop(saved: SavedHooks | None) -> Iterator[None]:
    """Inside, no dispatch mode and no saved-tensor hooks are on but `saved`, those that were when the forward began.

    A replay often begins in the middle of a forward. Non-reentrant checkpointing counts what its part of the model
    saves, and fails in backward where that was another number; a FLOP counter would count twice. `breakpoint()` does
    nothing: it has stopped once for this step. An optimizer is not stepped, OutOfReach is raised instead. All of it is
    as before afterwards, on every way out.
    """
    stops, steps = sys.breakpointhook, register_optimizer_step_pre_hook(_Refuse())
    sys.breakpointhook = _go_on
    try:
        with _disable_current_modes(), saved_hooks_only(saved):
            yield
    finally:
        sys.breakpointhook = stops
        steps.remove()


class _Refuse:
    """Ends the replay of a forward that steps an optimizer by itself: its state would be a step ahead."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            raise OutOfReach(
                f"Not replayed to its end: the forward steps an optimizer itself ({type(optimizer).__name__}), and a "
                f"second step of the same batch would change the run. Leave backward() and step() to the loop."
            )


def _go_on(*_args: Any, **_kwargs: Any) -> None:
    return None


class OutOfReach(BaseException):
    """The forward reads from what cannot be rewound. Not an Exception, so that no handler in the forward takes it."""


class ConsumedStub:
    """Stands where an iterator, a queue or a file stood: reading ends the replay, writing does nothing."""

    def __init__(self, original: Any, kind: Consumed, name: str) -> None:
        self._original = original
        self._kind: Consumed = kind
        self._name = name

    def __iter__(self) -> ConsumedStub:
        return self

    def __next__(self) -> NoReturn:
        self._end()

    def __enter__(self) -> ConsumedStub:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def __getattr__(self, attribute: str) -> Any:
        if attribute in _READS[self._kind]:
            return self._end
        return _nothing if attribute in _WRITES[self._kind] else getattr(self._original, attribute)

    def _end(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        of = type(self._original).__qualname__
        article = "an" if self._kind == "iterator" else "a"
        raise OutOfReach(
            f"Not replayed: the forward reads from `{self._name}`, {article} {self._kind} ({of}), which has no way "
            f"back: a second forward would take from it what belongs to the loop. Take the batch out of it in the "
            f"loop, and give the model tensors."
        )


class LockStub:
    """Stands where a lock, an event or a barrier stood: the forward that is being replayed may still hold it."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *raised: object) -> None:
        return None

    def __getattr__(self, attribute: str) -> Any:
        return _at_once

    def locked(self) -> bool:
        """Nobody holds it."""
        return False


def _at_once(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def with_stubs(value: Any, name: str, depth: int = 0) -> Any:
    """Inputs with stubs for iterators, queues and files; the same object where there is none in it."""
    if type(value) in (tuple, list, dict) and depth < _DEEPEST and len(value) <= _LONGEST:
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        stubbed = {key: with_stubs(each, f"{name}[{key!r}]", depth + 1) for key, each in pairs}
        if all(stubbed[key] is each for key, each in pairs):
            return value
        return stubbed if isinstance(value, dict) else type(value)(stubbed.values())
    if may_block(value):
        return LockStub()
    kind = consumed(value)
    return value if kind is None else ConsumedStub(value, kind, name)


def stub_attributes(model: nn.Module) -> None:
    """Put stubs in place of such attributes of modules; who has held the attributes before puts them back."""
    for path, module in model.named_modules():
        for name, value in own_attributes(module):
            vars(module)[name] = with_stubs(value, f"{path}.{name}" if path else name)
