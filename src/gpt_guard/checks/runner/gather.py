"""Bring what a person gives to `check` into one form, and work out what nobody gave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checkpoint.read import take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checks.files.stage import UnusableFile, read_checkpoint, read_ids, read_tokenizer
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import in_form_of, shifts_inside
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.checks.tokenizer.vocabulary import model_rows
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.hooks.isolation.preserve import preserved

Batch = tuple[Tensor, Tensor]
Path_ = str | os.PathLike[str]
T = TypeVar("T")

INPUT_NAMES = ("input_ids", "x", "inputs", "input", "tokens", "ids")
LABEL_NAMES = ("labels", "y", "targets", "target", "label")
VOCAB_NAMES = ("vocab_size", "n_vocab", "vocabulary_size", "num_tokens", "n_tokens", "padded_vocab_size")
BLOCK_NAMES = (
    "block_size",
    "n_positions",
    "max_position_embeddings",
    "context_length",
    "max_seq_len",
    "max_seq_length",
    "max_length",
    "seq_len",
    "n_ctx",
)
"""How hand-written GPTs, nanoGPT, llama code and Hugging Face configs call the two sizes."""
BATCH_SIZE = 8
"""Rows of a batch that is cut from the data: the batch size of the smallest common training configuration."""
_LENGTH = 8
_LONGEST = 64


def gather(
    subject: Subject,
    *,
    batch: Any,
    data: Any,
    tokenizer: Any,
    batches: Any,
    checkpoint: Any,
    device: str | torch.device | None,
    trained: bool | None,
) -> None:
    """Put into the subject what needs another form. Files that cannot be used are noted, for the stage that tells them.

    Raises GuardUsageError for an argument of a kind that is not understood, and where nothing was given at all.
    """
    model = subject.model
    if all(given is None for given in (model, batch, data, tokenizer, subject.optimizer, batches, checkpoint)):
        raise GuardUsageError("there is nothing to check: give a model, a batch, data, a tokenizer or a checkpoint")
    if model is not None and not isinstance(model, nn.Module):
        raise GuardUsageError(f"model is {_kind(model)}; give an nn.Module (call a factory first: make_model())")
    if model is not None and any(map(is_lazy, model.parameters())):
        raise GuardUsageError(
            "the model has lazy parameters; run one forward so that they get their shapes, then check"
        )
    if device is None:
        subject.device = subject.model_device
        placed = model is not None and any(True for _ in model.parameters())
        subject.sources["device"] = "where the model is" if placed else "nothing else was asked for"
    else:
        subject.device = torch.device(device)
    subject.batch = pair(batch) if batch is not None else None
    subject.batches = each_batch(batches) if batches is not None else None
    for name, ids in _splits(data).items():
        if (found := _read(subject, name, ids, read_ids)) is not None:
            subject.data[name] = as_ids(name, found)
    found = _read(subject, "tokenizer", tokenizer, read_tokenizer)
    subject.tokenizer = adapt(found) if found is not None else None
    subject.payload = _read(subject, "checkpoint", checkpoint, read_checkpoint)
    if trained is None:
        trained = was_trained(model, subject.optimizer, subject.payload)
    subject.trained = trained


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


def complete(subject: Subject) -> None:
    """Fill in what can be derived, and note in `subject.sources` where it came from.

    Runs the model on drawn ids, without gradient and with its state restored, to see whether it shifts targets itself.
    """
    model = subject.model
    if subject.config is None and model is not None:
        subject.config = getattr(unwrap(model), "config", None)
    if subject.vocab_size is None:
        _take(subject, "vocab_size", _vocab_size(subject))
    if subject.block_size is None:
        _take(subject, "block_size", _block_size(subject))
    if subject.make_model is None and model is not None and subject.config is not None:
        _take(subject, "make_model", _make_model(unwrap(model), subject.config))
    if model is not None and not subject.shifts_inside:
        subject.shifts_inside = _shifts_inside(subject, model)
    if subject.batch is None:
        _take(subject, "batch", _batch(subject))
    if subject.block_size is None and subject.batch is not None:
        _take(subject, "block_size", (subject.batch[0].size(-1), "the length of the batch's rows"))


def _take(subject: Subject, name: str, found: tuple[Any, str] | None) -> None:
    if found is not None:
        setattr(subject, name, found[0])
        subject.sources[name] = found[1]


def setting(config: Any, name: str) -> Any:
    """One setting of a config, an object or a dict; None where there is none, or only a flag."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return None if isinstance(value, bool) else value


def sizes(config: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Those of these settings that a config has as a positive number."""
    found = {name: setting(config, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int) and value > 0}


def _size(config: Any, names: tuple[str, ...]) -> tuple[int, str] | None:
    return next(((value, f"config.{name}") for name, value in sizes(config, names).items()), None)


def _vocab_size(subject: Subject) -> tuple[int, str] | None:
    if (found := _size(subject.config, VOCAB_NAMES)) is not None:
        return found
    tables = _tables(subject.model, positions=False)
    if len(tables) == 1:
        name, table = tables[0]
        return table.size(0), f"the rows of {name}"
    if subject.tokenizer is not None and subject.tokenizer.size > 0:
        return subject.tokenizer.size, "the tokenizer"
    return None


def _block_size(subject: Subject) -> tuple[int, str] | None:
    if (found := _size(subject.config, BLOCK_NAMES)) is not None:
        return found
    tables = _tables(subject.model, positions=True)
    return (tables[0][1].size(-2), f"the rows of {tables[0][0]}") if len(tables) == 1 else None


def _tables(model: nn.Module | None, *, positions: bool) -> list[tuple[str, Tensor]]:
    """Embedding tables for positions, or for all else; learned positions may also be a bare parameter."""
    if model is None:
        return []
    found: list[tuple[str, Tensor]] = [
        (f"{name}.weight", module.weight) for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    if positions:
        known = {id(table) for _, table in found}
        found += [(name, p) for name, p in model.named_parameters() if id(p) not in known and 2 <= p.dim() <= 3]
    return [(name, table) for name, table in found if _is_position(name) is positions]


def _is_position(name: str) -> bool:
    last = name.removesuffix(".weight").rpartition(".")[2].lower()
    return "pos" in last or last == "wpe"


def _make_model(model: nn.Module, config: Any) -> tuple[Callable[[], nn.Module], str] | None:
    """`type(model)(config)`, if that gives a model of the same names and shapes."""

    def build() -> nn.Module:
        return in_form_of(type(model)(config), model)

    shapes = {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    with preserved(), contextlib.suppress(Exception):  # a class that takes other arguments cannot be built like this
        fresh = build()
        same = {name: value.shape for name, value in fresh.state_dict().items() if isinstance(value, Tensor)} == shapes
        return (build, f"{type(model).__name__}(config)") if same else None
    return None


def _shifts_inside(subject: Subject, model: nn.Module) -> bool:
    """Asked with drawn ids: one of a batch that is out of range would end all work on a CUDA device."""
    x = subject.inputs[0] if subject.inputs is not None else None
    rows = model_rows(subject)
    size = rows[0] if rows is not None else subject.vocab_size
    if x is None and size is not None:
        length = min(subject.block_size or _LENGTH, _LONGEST)
        x = torch.zeros(1, length, dtype=torch.int64, device=subject.model_device)
    with preserved(model):
        return x is not None and shifts_inside(model, x.long(), size)


def _batch(subject: Subject) -> tuple[tuple[Tensor, Tensor], str] | None:
    """From the user's own batches, else rows spread evenly over the training data."""
    if subject.batches is not None:
        first = next(iter(subject.batches()), None)
        return (first, "the first of the batches") if first is not None else None
    ids, length = subject.data.get("train"), subject.block_size
    if ids is None or length is None or ids.dim() != 1 or ids.numel() <= length:
        return None
    if ids.is_floating_point() or ids.is_complex() or ids.is_meta:
        return None
    starts = torch.linspace(0, ids.numel() - length - 1, BATCH_SIZE).long()
    # Cut first, then cast: uint16 has no gather, and a large file is not to be copied as int64.
    rows = torch.stack([ids[start : start + length + 1].long() for start in starts.tolist()]).to(subject.model_device)
    x = rows[:, :-1].contiguous()
    y = x.clone() if subject.shifts_inside else rows[:, 1:].contiguous()
    return (x, y), f"{BATCH_SIZE} rows of {length} ids from the training data"
