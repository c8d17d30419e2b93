"""Leave a model as it was: whatever a replayed forward may write to is held before, and put back after."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gpt_guard.hooks.isolation.keeping import Keeper
from gpt_guard.hooks.isolation.rerun import is_plain_object
from gpt_guard.hooks.tensors import version_of
from gpt_guard.replaying.state import REGISTRIES, OwnState, lend_copies
from gpt_guard.replaying.stubs import lend_attributes

# Buffers are always copied, parameters and other tensors of modules only up to here: a forward seldom writes to them.
_MOST_BYTES = 256 * 2**20
# Caches and counters are few; a model that holds its trainer, and so all of its data, is not gone through.
_MOST_OBJECTS = 1000


class ForwardKeeper(Keeper):
    """Holds what a forward may change: buffers, attributes of modules and of plain objects, generators, and parameters.

    `changing` are tensors that are known to be written to and are copied whatever their size; `given` is what the
    forward is called with. Containers that nothing
    has changed are not written to either: a loop of the user's may be going through one.
    """

    def __init__(self, model: nn.Module, changing: Collection[Tensor] = (), given: Any = ()) -> None:
        super().__init__()
        self._always = {id(tensor) for tensor in (*model.buffers(), *changing)}
        self._budget = _MOST_BYTES
        self._objects = _MOST_OBJECTS
        self.watched: list[tuple[Tensor, int, int]] = []
        self.written: list[Tensor] = []
        self.keep(model)
        self.keep(given)

    def _hold(self, one: Any) -> list[Any] | None:
        if isinstance(one, Optimizer):
            return None
        found = super()._hold(one)
        if found is None and self._objects and is_plain_object(one):
            self._objects -= 1
            return self._hold_mapping(vars(one))
        return found

    def _hold_items(self, items: Any) -> list[Any]:
        held = super()._hold_items(items)
        self._only_if_changed(lambda: list(map(id, items)) != list(map(id, held)))
        return held

    def _hold_set(self, items: set[Any]) -> list[Any]:
        held = set(items)
        found = super()._hold_set(items)
        self._only_if_changed(lambda: items != held)
        return found

    def _only_if_changed(self, changed: Callable[[], bool]) -> None:
        undo = self._structure.pop()
        self._structure.append(lambda: undo() if changed() else None)

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
    `surrounded_by`. What could not be is said in `notes`; state of extension modules is out of reach. Where a loop is
    still running (`live`), iterators, queues and files that modules hold are replaced by stand-ins meanwhile. `own`
    gets the names of buffers and attributes that what ran has written to: they were not as the first forward found
    them.
    """
    keeper = ForwardKeeper(model, changing, given)
    # Inference tensors count nothing.
    counted = tuple(tensor for tensor in keeper.written if version_of(tensor) >= 0)
    gradients = [(each, each.grad) for each in model.parameters() if each.grad is not None]
    drawn = _python_random()
    lend_copies(model)
    if live:
        lend_attributes(model, REGISTRIES)
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
        if drawn():
            notes.append("The step draws from Python's or numpy's generator, whose state at that time is not kept.")
        if keeper.changed():
            notes.append("The forward writes to tensors that are too large to copy: the replay has changed them.")


def _python_random() -> Callable[[], bool]:
    """Hold the generators of Python and numpy; what is returned puts them back, and tells whether they were used."""
    python = random.getstate()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    other = numpy.get_state() if numpy is not None else None

    def put_back() -> bool:
        used = random.getstate() != python
        random.setstate(python)
        if numpy is not None:
            used = used or pickle.dumps(numpy.get_state()) != pickle.dumps(other)
            numpy.set_state(other)
        return used

    return put_back
