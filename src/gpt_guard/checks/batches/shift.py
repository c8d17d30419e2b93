"""By how many positions the targets are shifted against the inputs, found by comparing ids."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_guard.callbacks.losses.pairing import SURE, TargetShift, find_shift, hits_of
from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import LossFunction
from gpt_guard.records import Finding

MANY_ROWS = 64


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
    except Exception:  # it may want other shapes; then its shift cannot be told like this
        return False
    here = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    following = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return bool(loss.dim() == 0 and torch.isclose(loss, following, rtol=1e-3) and not torch.isclose(loss, here))


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
