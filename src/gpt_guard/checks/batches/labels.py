"""Which targets count: all ignored, the end of sequence left out, padding left in."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import call
from gpt_guard.checks.tokenizer.vocabulary import SpecialId
from gpt_guard.records import Finding, Severity

Batch = tuple[Tensor, Tensor]
_IGNORED = -100
MIN_PADDING = 4
"""Equal ids at the end of a row that count as padding where only a default says which id that is."""


class Supervised(NamedTuple):
    """Targets that count, of how many; rows that have one, of how many."""

    targets: int
    of: int
    rows: int
    of_rows: int


def supervised(batches: list[Batch], ignore_index: int) -> Supervised:
    """Count over all batches. Reads the device."""
    counts = [(y != ignore_index).sum(1) for _, y in batches]
    per_row = torch.cat([count.cpu() for count in counts])
    total = sum(y.numel() for _, y in batches)
    return Supervised(int(per_row.sum()), total, int(per_row.count_nonzero()), per_row.numel())


def hardly_any(seen: Supervised, ignore_index: int) -> Finding | None:
    """GG606: an error where no target counts, or fewer do than there are rows, or most rows have none; else a warning.

    One target for each row is the least from which every row can teach something; answers of one token have no more.
    """
    if seen.rows == seen.of_rows:
        return None
    text = (
        f"{seen.targets} of {seen.of} targets count, the rest is {ignore_index}; "
        f"{seen.of_rows - seen.rows} of {seen.of_rows} rows have none"
    )
    fails = seen.targets < seen.of_rows or 2 * seen.rows < seen.of_rows
    return finding(
        "GG606",
        text,
        likely=["marker", "truncated"] if fails else ["truncated", "marker"],
        severity=Severity.ERROR if fails else Severity.WARNING,
        evidence=seen._asdict(),
    )


def end_left_out(batches: list[Batch], eos: SpecialId, shift: int, ignore_index: int) -> tuple[int, int]:
    """How often the end of sequence is a target, and how often it is not although the token before it is one."""
    counted = left_out = 0
    for x, y in batches:
        counted += int((y == eos.id).sum())
        targets, coming = (y[:, :-1], x[:, 1:]) if shift == 1 else (y[:, 1:], x[:, 1:])
        ends = (coming == eos.id) & (targets == ignore_index)
        before = targets.roll(1, 1) != ignore_index
        before[:, 0] = False
        left_out += int((ends & before).sum())
    return counted, left_out


def padding_targets(x: Tensor, y: Tensor, pad: SpecialId, eos: SpecialId | None, shift: int) -> Tensor:
    """Where `[B, T]` padding is a target. Where it is the end of sequence too, the first of each run is meant.

    Where only a default says which id is padding, runs of MIN_PADDING at a border of a row are taken for it.
    """
    is_pad = y == pad.id
    if eos is not None and eos.id == pad.id:
        last = x if shift == 1 else torch.cat([torch.full_like(x[:, :1], -1), x[:, :-1]], 1)
        is_pad = is_pad & (last == pad.id)
    if pad.declared:
        return is_pad
    right = _trailing(y == pad.id)
    left = _trailing((y == pad.id).flip(1)).flip(1)
    return is_pad & (right | left)


def loss_ignores(subject: Subject, x: Tensor, y: Tensor, where: Tensor, shift: int) -> bool:
    """True where the project's own loss is the mean without these places rather than with them.

    Runs one forward in eval mode, without gradient; without a loss of the model's or `loss_fn` it is False.
    """
    model = subject.model
    if model is None or subject.inputs is None:
        return False
    device = subject.inputs[0].device
    x, y, where = x.to(device), y.to(device), where.to(device)
    model.eval()
    try:
        with torch.no_grad():
            logits, loss = call(model, x, y)
            if subject.loss_fn is not None:
                loss = subject.loss_fn(logits, y)
    except Exception:  # a call that fails is for the stages that ask how the model is called
        return False
    if loss is None or loss.dim() or logits.shape[:2] != y.shape:
        return False
    y = y.masked_fill(y == subject.ignore_index, _IGNORED)
    with_them, without = (_mean(logits, targets, shift) for targets in (y, y.masked_fill(where, _IGNORED)))
    # Label smoothing and auxiliary terms move the loss a little off the plain mean.
    return bool((loss - without).abs() < 0.25 * (loss - with_them).abs())


def _mean(logits: Tensor, y: Tensor, shift: int) -> Tensor:
    if shift == 0:
        logits, y = logits[:, :-1], y[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten().long(), ignore_index=_IGNORED)


def _trailing(same: Tensor) -> Tensor:
    """Where a run of at least MIN_PADDING reaches the right border."""
    run = same.flip(1).long().cumprod(1).flip(1).bool()
    return run & (run.sum(1, keepdim=True) >= MIN_PADDING)
