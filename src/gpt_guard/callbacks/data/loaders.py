"""Where the loop gets its data: which loaders it iterates, how often and from which line, and whether it draws rows."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from gpt_guard.callbacks.data.order import EpochOrder
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.patches import Patch
from gpt_guard.records import SourceLine

Loader = DataLoader[Any]


class LoaderUse:
    """One loader, and how the loop has used it: begun how often, and in which of those epochs training was seen last.

    Its figures are noted when it is first seen; the loader itself is not kept alive. `workers` are the processes that
    load, `batches` those of an epoch, None where that is not known; `in_order`: the samples come in the order of the
    dataset.
    """

    def __init__(self, loader: Loader, line: SourceLine | None) -> None:
        self._loader = weakref.ref(loader)
        self.line = line
        self.iterations = 0
        self.trained_in = 0
        self.batch_size: int | None = loader.batch_size
        self.workers = loader.num_workers
        self.batches = _length(loader)
        self.in_order = _in_order(loader)
        self.order = EpochOrder()
        self._dataset = _weakly(loader.dataset)

    def is_of(self, loader: Loader) -> bool:
        """Whether this is the use of that loader."""
        return self._loader() is loader

    def made_anew(self, loader: Loader) -> bool:
        """Whether that loader takes the place of this one: the same data, cut into as many batches."""
        same = (self.batch_size, self.workers) == (loader.batch_size, loader.num_workers)
        return same and self._dataset is not None and self._dataset() is loader.dataset


def _weakly(dataset: Any) -> Callable[[], Any] | None:
    try:
        return weakref.ref(dataset)
    except TypeError:
        # A list, for example: it cannot be told from another one later.
        return None


def _in_order(loader: Loader) -> bool:
    batches = loader.batch_sampler
    # Beside a batch sampler of the user's own, the loader's sampler is there and not used.
    if batches is not None and type(batches) is not BatchSampler:
        return False
    return type(loader.sampler if batches is None else batches.sampler) is SequentialSampler


def _length(loader: Loader) -> int | None:
    # Asking for the length of a stream would make torch compare it with what comes, and warn.
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    # A dataset or sampler of the user's own may raise anything, a TypeError above all where it has no length.
    except Exception:
        return None


class LoaderLog:
    """The loaders that were iterated while this was open; `current` is the last of them."""

    def __init__(self) -> None:
        self.uses: list[LoaderUse] = []
        self.current: LoaderUse | None = None

    def open(self) -> None:
        """Begin to see `iter(loader)` of every loader of torch's kind."""
        LOADERS.add(self)

    def close(self) -> None:
        """Stop; may run twice."""
        LOADERS.remove(self)
        self.uses.clear()
        self.current = None

    def iterated(self, loader: Loader) -> None:
        """A loader begins an epoch."""
        use = next((each for each in self.uses if each.is_of(loader)), None)
        if use is None:
            use = LoaderUse(loader, user_line())
            if self.uses and self.uses[-1].made_anew(loader) and self.uses[-1].line == use.line:
                use.order = self.uses[-1].order
            self.uses.append(use)
        use.order.begins(loader)
        use.iterations += 1
        self.current = use


def loaders_of(batch: Tensor) -> Iterator[LoaderUse]:
    """Loaders of tensors whose data set holds the first row of this batch, and which give batches of its size.

    Wherever in the process they are: a pass over all objects, for rare use. Of other data sets nothing can be told
    without running the user's code: a loader that happens to have the same batch size is no evidence.
    """
    for each in gc.get_objects():
        # By its type: isinstance may run code of the object.
        if not issubclass(type(each), DataLoader) or getattr(each, "batch_size", None) != len(batch):
            continue
        if _holds(getattr(each, "dataset", None), batch[0]):
            yield LoaderUse(each, None)


def _holds(dataset: Any, row: Tensor) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if not isinstance(dataset, TensorDataset) or not dataset.tensors:
        return False
    rows = dataset.tensors[0]
    if rows.shape[1:] != row.shape or rows.dtype != row.dtype or rows.device != row.device:
        return False
    return bool((rows == row).flatten(1).all(1).any()) if rows.dim() > 1 else bool((rows == row).any())


def _iterated(original: Any, listeners: tuple[LoaderLog, ...], loader: Loader) -> Any:
    for log in listeners:
        # A loader of the user's own may lack anything that torch's has; it must be iterated all the same.
        with contextlib.suppress(Exception):
            log.iterated(loader)
    return original(loader)


LOADERS = Patch(DataLoader, "__iter__", _iterated)


class Draws:
    """Whether the loop draws its batches at random: the same one each time is then a fault, or all there is.

    Told by torch's own calls in inspected steps, or by a generator that has moved: one that is seeded in the function
    that draws stands at the same place in each step, but it moved, or was set, between the start of the watch and the
    first forward. One of the user's own that torch does not draw from (`numpy.random.default_rng(0)`) leaves no trace.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: tuple[Any, Tensor] | None = _generators()

    def forward_begins(self) -> None:
        """A forward in training begins; only the first one is looked at."""
        if self._before is None:
            return
        (others, states), self._before = self._before, None
        now, state = _generators()
        # Both lie on the host: no device is read, and no mode of the user's needs to see it.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.seen = self.seen or now != others or not torch.equal(state, states)


def _generators() -> tuple[Any, Tensor]:
    """Where the shared generators of Python and of numpy, if it is loaded, stand; and torch's on the CPU."""
    numpy, known = sys.modules.get("numpy"), None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        known = (kind, keys.tobytes(), *rest)
    return (random.getstate(), known), torch.get_rng_state()
