"""Token ids to ask a model with, and ids to put in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.base import Subject, vocabulary
from gpt_guard.checks.runner.forward import call
from gpt_guard.hooks.isolation.preserve import preserved, quiet, seed_all

ROWS = 3
LONGEST = 64
"""Rows and positions that are asked about: more show nothing new, and cost of attention grows with their square."""
_LARGE, _LONGEST_IF_LARGE = 3 * 10**7, 24
"""Parameters from which rows are cut shorter: a model of 124 million then takes half a minute on one core."""
_HALF = (torch.float16, torch.bfloat16)

Forward = Callable[[Tensor], Tensor]


@contextmanager
def precise(model: nn.Module, x: Tensor) -> Iterator[None]:
    """The model in float32 where its weights are of half precision, unless it cannot run like that.

    A leak of a thousandth is below bfloat16's rounding. Weights and buffers are bit-identical afterwards.
    """
    if not any(parameter.dtype in _HALF for parameter in model.parameters()):
        yield
        return
    with widened(model, x, torch.float32) as runs:
        if runs:
            yield
    if not runs:
        yield


@contextmanager
def widened(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Iterator[bool]:
    """The model with weights and buffers of another dtype; yields whether it runs like that on ids `[B, T]`."""
    with preserved(model):
        yield _runs(model, x, dtype)


def _runs(model: nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    try:
        model.to(dtype)
        with quiet(model):
            call(model, x)
    except Exception:  # its code, a kernel or the device asks for the precision it has
        return False
    return True


def repeatable(model: nn.Module, seed: int) -> Forward:
    """A function from ids `[B, T]` to logits, with the same random numbers at every call.

    Dropout that is active by mistake then cancels out, and is left to the check that looks for it.
    """

    def forward(x: Tensor) -> Tensor:
        seed_all(seed)
        return call(model, x).logits

    return forward


def probe_ids(subject: Subject, rows: int = ROWS, length: int | None = None) -> Tensor:
    """Ids `[rows, length]` on the model's device: from the batch as far as it goes, the rest drawn at random.

    Without `length`: what the batch or block_size allow, at most `LONGEST`.
    """
    vocab = vocabulary(subject)
    given = subject.inputs[0] if subject.inputs is not None else None
    if vocab is None:
        raise ValueError("neither a batch nor a vocabulary size is known")
    if length is None:
        limit = given.size(1) if given is not None else subject.block_size or 16
        length = min(limit, subject.block_size or limit, _longest(subject.model))
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(subject.seed))
    if subject.pad_id is not None:
        ids = torch.where(ids == subject.pad_id, (ids + 1) % vocab, ids)
    if given is None:
        return ids.to(subject.model_device)
    ids = ids.to(device=given.device, dtype=given.dtype)
    part = given[:rows, :length]
    ids[: part.size(0), : part.size(1)] = part
    return ids


def other_ids(ids: Tensor, vocab: int, generator: torch.Generator, avoid: int | None = None) -> Tensor:
    """Ids of the same shape, each another than before and none of them `avoid` (where the vocabulary has a third)."""
    step = torch.randint(1, vocab, tuple(ids.shape), generator=generator).to(device=ids.device, dtype=ids.dtype)
    changed = (ids + step) % vocab
    if avoid is not None and vocab > 2:
        after = (changed + 1) % vocab
        after = torch.where(after == ids, (after + 1) % vocab, after)
        changed = torch.where(changed == avoid, after, changed)
    return changed


def _longest(model: nn.Module | None) -> int:
    parameters = sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0
    return LONGEST if parameters < _LARGE else _LONGEST_IF_LARGE
