"""Bring what a person gives to `check` into one form: batches of any make, arrays, paths, a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gpt_guard.checkpoint.read import take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checks.files.stage import UnusableFile, read_checkpoint, read_ids, read_tokenizer
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.errors import CheckpointError, GuardUsageError

Batch = tuple[Tensor, Tensor]
Path_ = str | os.PathLike[str]
T = TypeVar("T")

INPUT_NAMES = ("input_ids", "x", "inputs", "input", "tokens", "ids")
LABEL_NAMES = ("labels", "y", "targets", "target", "label")


def gather(
    *,
    model: nn.Module | None,
    batch: Any,
    data: Any,
    tokenizer: Any,
    optimizer: Optimizer | None,
    config: Any,
    batches: Any,
    checkpoint: Any,
    device: str | torch.device | None,
    trained: bool | None,
) -> Subject:
    """A subject with all that was given. Files that cannot be used are noted in it, for the stage that speaks of them.

    Raises GuardUsageError for an argument of a kind that is not understood, and where nothing was given at all.
    """
    if all(given is None for given in (model, batch, data, tokenizer, optimizer, batches, checkpoint)):
        raise GuardUsageError("there is nothing to check: give a model, a batch, data, a tokenizer or a checkpoint")
    if model is not None and not isinstance(model, nn.Module):
        raise GuardUsageError(f"model is {_kind(model)}; give an nn.Module (call a factory first: make_model())")
    if model is not None and any(map(is_lazy, model.parameters())):
        raise GuardUsageError(
            "the model has lazy parameters; run one forward so that they get their shapes, then check"
        )
    subject = Subject(model=model, optimizer=optimizer, config=config)
    _set_device(subject, device)
    subject.batch = pair(batch) if batch is not None else None
    subject.batches = each_batch(batches) if batches is not None else None
    for name, ids in _splits(data).items():
        if (found := _read(subject, name, ids, read_ids)) is not None:
            subject.data[name] = as_ids(name, found)
    found = _read(subject, "tokenizer", tokenizer, read_tokenizer)
    subject.tokenizer = adapt(found) if found is not None else None
    subject.payload = _read(subject, "checkpoint", checkpoint, read_checkpoint)
    subject.trained = bool(trained) if trained is not None else was_trained(model, optimizer, subject.payload)
    return subject


def _set_device(subject: Subject, device: str | torch.device | None) -> None:
    """The device that was chosen, else the model's own; on which it counts as chosen by nobody."""
    if device is not None:
        subject.device = torch.device(device)
        return
    first = next(iter(subject.model.parameters()), None) if subject.model is not None else None
    if first is not None:
        subject.device = first.device
    subject.sources["device"] = "where the model is" if first is not None else "nothing else was asked for"


def _splits(data: Any) -> Mapping[str, Any]:
    if data is None:
        return {}
    return data if isinstance(data, Mapping) else {"train": data}


def _read(subject: Subject, kind: str, given: T | Path_ | None, read: Callable[[Path], T]) -> T | None:
    """What was given, or what is in the file if it is a path."""
    if not isinstance(given, (str, os.PathLike)):
        return given
    path = subject.paths[kind] = Path(given)
    try:
        return read(path)
    except UnusableFile as error:
        subject.unusable[kind] = error.finding
        return None


def as_ids(name: str, ids: Any) -> Tensor:
    """Token ids as a tensor; an array or a list is copied. Raises GuardUsageError for anything else."""
    if isinstance(ids, Tensor):
        return ids
    try:
        if hasattr(ids, "__array__"):
            # A memory-mapped file is read-only, which a tensor over the same memory could not be.
            return torch.from_numpy(ids.__array__().copy())
        return torch.tensor(list(ids))
    except (TypeError, ValueError) as error:
        raise GuardUsageError(
            f"data[{name!r}] is {_kind(ids)}: give the 1-D tensor of its token ids, or the path of a file"
        ) from error


def pair(batch: Any) -> Batch:
    """`(x, y)` from a tuple, a list or a dict; from a single tensor of rows, x and y are the same (`labels=input_ids`).

    Raises GuardUsageError for anything else.
    """
    if isinstance(batch, Tensor):
        return batch, batch
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        x = next((batch[name] for name in INPUT_NAMES if name in batch), None)
        y = next((batch[name] for name in LABEL_NAMES if name in batch), x)
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x, y
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2 and all(isinstance(t, Tensor) for t in batch[:2]):
        return batch[0], batch[1]
    raise GuardUsageError(
        f"a batch is (x, y), token ids [B, T] each, or a dict with {INPUT_NAMES[0]} and {LABEL_NAMES[0]}; "
        f"this one is {_kind(batch)}"
    )


def each_batch(batches: Any) -> Callable[[], Iterator[Batch]]:
    """A function that starts giving batches, from a loader, a list, or a function like get_batch or make_iterator.

    Raises GuardUsageError for an iterator that can be used only once: the checks must start from the front.
    """
    if isinstance(batches, Iterator):
        raise GuardUsageError("batches can be used only once: give the DataLoader or list itself, or a function")
    if isinstance(batches, Iterable):
        return lambda: map(pair, batches)
    if not callable(batches):
        raise GuardUsageError(f"batches is {_kind(batches)}: give a DataLoader, a list, or a function like get_batch")
    return lambda: _from_function(batches)


def _from_function(get: Callable[[], Any]) -> Iterator[Batch]:
    first = get()
    if isinstance(first, Iterator) or (isinstance(first, Iterable) and not _is_batch(first)):
        yield from map(pair, first)
        return
    yield pair(first)
    while True:  # a get_batch never ends; those who draw from it know how many they need
        yield pair(get())


def _is_batch(value: Any) -> bool:
    return isinstance(value, (Tensor, tuple, Mapping)) or hasattr(value, "keys") or _two_tensors(value)


def _two_tensors(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)


def was_trained(model: nn.Module | None, optimizer: Optimizer | None, payload: Mapping[str, Any] | None) -> bool:
    """True where the optimizer has made steps, or the model's weights are those of a checkpoint."""
    if optimizer is not None and optimizer.state:
        return True
    if model is None or payload is None:
        return False
    try:
        weights = take_apart(Path("checkpoint"), payload, Reporter(None)).weights
    except CheckpointError:
        return False
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return all(_equal(value, weights.get(name)) for name, value in own.items()) and bool(own)


def _equal(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one.cpu(), other.cpu().to(one.dtype))


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
