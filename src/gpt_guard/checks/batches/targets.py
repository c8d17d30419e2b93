"""The targets of a batch: by how many positions they are shifted, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_guard.callbacks.losses.pairing import SURE, TargetShift, find_shift, hits_of
from gpt_guard.callbacks.losses.targets import trailing_run
from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import LossFunction, Subject
from gpt_guard.checks.runner.forward import call
from gpt_guard.checks.tokenizer.vocabulary import SpecialId
from gpt_guard.records import Finding, Severity

Batch = tuple[Tensor, Tensor]
_IGNORED = -100
MANY_ROWS = 64


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


def not_shifted(
    x: Tensor, y: Tensor, expected: int = 1, ignore_index: int = -100, *, model_known: bool = False
) -> tuple[TargetShift, Finding | None]:
    """What was found, and GG603 where it is not `expected`; with too few targets to tell, neither."""
    found = find_shift(x, y, ignore_index, expected)
    if found.positions == 0 or (found.shift == expected and not found.odd_rows):
        return found, None
    words = "no shift fits" if found.shift is None else f"the shift is {found.shift}"
    seen = f"{words} ({found.share:.1%} of {found.positions} targets), where {expected} is expected"
    if found.shift == expected:
        seen = f"the shift is {expected} in most rows, but not in rows {_listed(found.odd_rows)} of {x.size(0)}"
    likely = _likely(x, y, found, expected, ignore_index, model_known)
    evidence = {"shift": found.shift, "expected": expected, "share": found.share, "positions": found.positions}
    return found, finding("GG603", seen, likely=likely, evidence={**evidence, "rows": list(found.odd_rows)})


def time_first(x: Tensor, y: Tensor, ignore_index: int = -100) -> bool:
    """True where the targets are shifted by one along the first dimension and not along the second."""
    if min(x.shape) < 2:
        return False
    across = find_shift(x.T, y.T, ignore_index)
    return find_shift(x, y, ignore_index).shift is None and across.shift == 1 and across.share >= SURE


def loss_shifts(loss_fn: LossFunction, vocab_size: int, device: torch.device) -> bool:
    """True where a loss function compares logits at t with target t + 1 itself; found on random logits."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, vocab_size, generator=draw).to(device)
    y = torch.randint(vocab_size, (2, 8), generator=draw).to(device)
    try:
        with torch.no_grad():
            loss = loss_fn(logits, y).float()
    except Exception:  # it may want other shapes; then its shift cannot be seen like this
        return False
    here = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    following = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return bool(loss.dim() == 0 and torch.isclose(loss, following, rtol=1e-3) and not torch.isclose(loss, here))


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
    right = trailing_run(y == pad.id)
    left = trailing_run((y == pad.id).flip(1)).flip(1)
    return is_pad & (right | left)


def own_loss(subject: Subject, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Logits and the project's own loss, by `loss_fn` or by the model; None for what there is not.

    One forward in eval mode, without gradient. A call that fails is for the stages that ask how the model is called.
    """
    if subject.model is None:
        return None, None
    subject.model.eval()
    try:
        with torch.no_grad():
            logits, loss = call(subject.model, x, y)
            return logits, loss if subject.loss_fn is None else subject.loss_fn(logits, y)
    except Exception:
        return None, None


def loss_ignores(subject: Subject, x: Tensor, y: Tensor, where: Tensor, shift: int) -> bool:
    """True where the project's own loss is the mean without these places rather than with them."""
    device = subject.inputs[0].device if subject.inputs is not None else x.device
    y, where = y.to(device), where.to(device)
    logits, loss = own_loss(subject, x.to(device), y)
    if logits is None or loss is None or loss.dim() or logits.shape[:2] != y.shape:
        return False
    y = y.masked_fill(y == subject.ignore_index, _IGNORED)
    with_them, without = (_mean(logits, targets, shift) for targets in (y, y.masked_fill(where, _IGNORED)))
    # Label smoothing and auxiliary terms move the loss a little off the plain mean.
    return bool((loss - without).abs() < 0.25 * (loss - with_them).abs())


def _likely(x: Tensor, y: Tensor, found: TargetShift, expected: int, ignore_index: int, model_known: bool) -> list[str]:
    if found.shift == expected:
        return ["some_rows"]
    if expected == 0:
        return ["inside"] if found.shift == 1 else ["unrelated"]
    by_shift = {0: ["unshifted"] if model_known else ["unshifted", "hf_labels"], 2: ["twice"], -1: ["past"]}
    if found.shift is not None:
        return by_shift.get(found.shift, ["offset"])
    return ["rows"] if _rows_are_mixed(x, y, expected, ignore_index) else ["unrelated"]


def _rows_are_mixed(x: Tensor, y: Tensor, expected: int, ignore_index: int) -> bool:
    rows = min(x.size(0), MANY_ROWS)
    x, y = x[:rows].long().cpu(), y[:rows].long().cpu()
    turned = (find_shift(x, y.roll(turn, 0), ignore_index, expected) for turn in range(1, rows))
    if any(found.shift == expected for found in turned):
        return True
    elsewhere = 0
    for row in range(rows):
        hits, known = hits_of(x, y[row].expand_as(x), expected, ignore_index)
        elsewhere += bool(((hits >= SURE * known) & (known > 0)).any())
    return elsewhere > rows / 2


def _listed(rows: Iterable[int]) -> str:
    numbers = list(rows)
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _mean(logits: Tensor, y: Tensor, shift: int) -> Tensor:
    if shift == 0:
        logits, y = logits[:, :-1], y[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten().long(), ignore_index=_IGNORED)
