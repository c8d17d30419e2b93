"""Work out what nobody gave: sizes from a config or a table, a batch from the data, how to build the model afresh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import shifts_inside
from gpt_guard.checks.tokenizer.vocabulary import model_rows
from gpt_guard.hooks.isolation.preserve import preserved

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


def setting(config: Any, names: tuple[str, ...]) -> tuple[int, str] | None:
    """The first of these settings that a config (an object or a dict) has as a positive number, and its name."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, f"config.{name}"
    return None


def _vocab_size(subject: Subject) -> tuple[int, str] | None:
    if (found := setting(subject.config, VOCAB_NAMES)) is not None:
        return found
    tables = _tables(subject.model, positions=False)
    if len(tables) == 1:
        name, table = tables[0]
        return table.size(0), f"the rows of {name}"
    if subject.tokenizer is not None and subject.tokenizer.size > 0:
        return subject.tokenizer.size, "the tokenizer"
    return None


def _block_size(subject: Subject) -> tuple[int, str] | None:
    if (found := setting(subject.config, BLOCK_NAMES)) is not None:
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
        # In the form of the given one: its dtype and device, without its weights.
        return _like(type(model)(config), model)

    shapes = {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    with preserved(), contextlib.suppress(Exception):  # a class that takes other arguments cannot be built like this
        fresh = build()
        same = {name: value.shape for name, value in fresh.state_dict().items() if isinstance(value, Tensor)} == shapes
        return (build, f"{type(model).__name__}(config)") if same else None
    return None


def _like(fresh: nn.Module, model: nn.Module) -> nn.Module:
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return fresh if first is None else fresh.to(device=first.device, dtype=first.dtype)


def _shifts_inside(subject: Subject, model: nn.Module) -> bool:
    """Asked with drawn ids: one of a batch that is out of range would end all work on a CUDA device."""
    x = subject.inputs[0] if subject.inputs is not None else None
    rows = model_rows(subject)
    size = rows[0] if rows is not None else subject.vocab_size
    if x is None and size is not None:
        length = min(subject.block_size or _LENGTH, _LONGEST)
        x = torch.zeros(1, length, dtype=torch.int64, device=_device_of(subject))
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
    rows = torch.stack([ids[start : start + length + 1].long() for start in starts.tolist()]).to(_device_of(subject))
    x = rows[:, :-1].contiguous()
    y = x.clone() if subject.shifts_inside else rows[:, 1:].contiguous()
    return (x, y), f"{BATCH_SIZE} rows of {length} ids from the training data"


def _device_of(subject: Subject) -> torch.device:
    first = next(iter(subject.model.parameters()), None) if subject.model is not None else None
    return subject.device if first is None else first.device
