"""Where the rows of batches come from: found in the data, row by row, and what their places say of how they are drawn.

A row of T ids is looked up by a hash of it, in all splits at once. What no shift within a row can show is seen here:
the last target, and everything about the draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.losses.targets import trailing_run
from gpt_guard.catalogue import finding
from gpt_guard.checks.batches.targets import Batch
from gpt_guard.checks.token_ids.copies import window_hashes
from gpt_guard.checks.token_ids.ids import is_integer
from gpt_guard.records import Finding

MOST_IDS = 2**23
"""Ids of a split up to which rows are looked up: half a second; in a longer one nothing is said."""
PIECE, FOREIGN = 4, 0.05
"""Ids of a short stretch, and the share of them below which rows are of another text or another tokenizer."""
LEAST_ROWS = 16
SPAN = 0.25
"""Of 16 places drawn evenly, all lie within a quarter of the text once in 2e8 times (16 * 0.25 ** 15)."""
SHORTEST = 3
KNOWN = 0.9
"""Share of the rows that must be found before anything is said of the others: rows may be masked or packed."""


class Places(NamedTuple):
    """Where each row of the batches begins in a split, -1 where it does not occur; `lengths` are the splits' sizes.

    `pieces` is the share of the short stretches of the rows that occur in train: of padded, packed or masked rows many
    do, of ids of another tokenizer none.
    """

    starts: dict[str, Tensor]
    lengths: dict[str, int]
    rows: int
    width: int
    pieces: float

    def share(self, split: str) -> float:
        """The share of the rows that occur in a split."""
        return float((self.starts[split] >= 0).float().mean())

    @property
    def train(self) -> Tensor:
        """Places in the training split, without those that are not there."""
        return self.starts["train"][self.starts["train"] >= 0]


def places(batches: Sequence[Batch], data: dict[str, Tensor]) -> Places | None:
    """Look up all rows; None where there is no training split, or one too long, or rows too short to be told apart."""
    usable = {name: ids for name, ids in data.items() if ids.dim() == 1 and is_integer(ids) and not ids.is_meta}
    shapes = {x.shape[1:] for x, _ in batches}
    if "train" not in usable or len(shapes) != 1 or not batches or batches[0][0].dim() != 2:
        return None
    width = batches[0][0].size(1)
    if width < 8 or any(not width < ids.numel() <= MOST_IDS for ids in usable.values()):
        return None
    rows = torch.cat([x.detach().cpu().long() for x, _ in batches])
    hashes = torch.cat([window_hashes(row, width) for row in rows])
    starts = {name: _found(ids, hashes, rows) for name, ids in usable.items()}
    return Places(
        starts, {name: ids.numel() for name, ids in usable.items()}, rows.size(0), width, _pieces(usable["train"], rows)
    )


def _found(ids: Tensor, hashes: Tensor, rows: Tensor) -> Tensor:
    known = window_hashes(ids, rows.size(1))
    ordered, order = known.sort()
    at = torch.searchsorted(ordered, hashes).clamp_(max=ordered.numel() - 1)
    starts = order[at]
    same = ids.long()[starts[:, None] + torch.arange(rows.size(1))] == rows
    return torch.where((ordered[at] == hashes) & same.all(1), starts, -1)


def _pieces(ids: Tensor, rows: Tensor) -> float:
    known = window_hashes(ids, PIECE).unique()
    pieces = torch.cat([window_hashes(row, PIECE) for row in rows])
    at = torch.searchsorted(known, pieces).clamp_(max=known.numel() - 1)
    return float((known[at] == pieces).float().mean())


def judge_places(found: Places) -> Iterator[Finding]:
    """GG679 for rows of another split, for rows of a small part, and for windows that slide."""
    inside, evidence = found.share("train"), {"rows": found.rows, "in_train": found.share("train")}
    for name in found.starts:
        outside = (found.starts[name] >= 0) & (found.starts["train"] < 0)
        if name != "train" and float(outside.float().mean()) > 1 - KNOWN:
            seen = f"{int(outside.sum())} of {found.rows} rows occur in {name} and not in train"
            yield finding("GG679", seen, likely=["validation"], evidence=evidence)
            return
    if inside == 0.0 and found.pieces < FOREIGN:
        seen = (
            f"not one of {found.rows} rows occurs in the training ids, nor {found.pieces:.0%} of stretches of {PIECE}"
        )
        yield finding("GG679", seen, likely=["elsewhere"], evidence=evidence)
        return
    if inside < KNOWN or found.rows < LEAST_ROWS:
        return
    starts, length, width = found.train, found.lengths["train"], found.width
    steps = starts.diff()
    forward = float((steps > 0).float().mean())
    step = int(steps.median())
    if forward > KNOWN and 0 < step <= width // 2:
        seen = (
            f"rows of {width} ids begin at {', '.join(map(str, starts[:4].tolist()))}, ...: each is the one before, "
            f"moved by {step}"
        )
        yield finding("GG679", seen, likely=["sliding"], evidence={**evidence, "step": step})
        return
    span = int(starts.max() - starts.min()) + width
    if forward <= KNOWN and span < SPAN * length and span < length - 4 * width:
        seen = (
            f"{found.rows} rows, drawn in no order, all begin within {span:,} of {length:,} ids, "
            f"from {int(starts.min())} to {int(starts.max())}"
        )
        yield finding("GG679", seen, likely=["narrow"], evidence={**evidence, "span": span})


def last_target(batches: Sequence[Batch], found: Places | None, data: dict[str, Tensor], ignore: int) -> Finding | None:
    """GG603 where the last target of the rows is none that follows them: what a shift inside cannot see."""
    x, y = (torch.cat([batch[part].detach().cpu().long() for batch in batches]) for part in (0, 1))
    last = y[:, -1]
    counted = last != ignore
    if found is not None and "train" in found.starts:
        ids, starts = data["train"].cpu(), found.starts["train"]
        after = starts + found.width
        known = counted & (starts >= 0) & (after < ids.numel())
        if int(known.sum()) < 4:
            return None
        wrong = known & (ids[after.clamp(max=ids.numel() - 1)].long() != last)
        if int(wrong.sum()) <= int(known.sum()) // 2:
            return None
    elif int(counted.sum()) < LEAST_ROWS:
        return None
    else:
        wrong = counted
    key = _kind_of_last(batches, x, y, counted)
    if key is None:
        if found is None:
            return None
        key = "last_other"
    words = {
        "rolled": "is the first id of a row: a roll has brought it round",
        "last_constant": f"is always {int(last[0])}, or the last input once more",
        "last_other": "is not the id that follows the row in the training text",
    }
    seen = f"the last target of {int(wrong.sum())} of {int(counted.sum())} rows {words[key]}"
    return finding("GG603", seen, likely=[key])


def _kind_of_last(batches: Sequence[Batch], x: Tensor, y: Tensor, counted: Tensor) -> str | None:
    last = y[:, -1]
    rolled = torch.cat([batch[0].detach().cpu().long()[:, 0].roll(-1) for batch in batches])
    if any(bool((last == first)[counted].all()) for first in (x[:, 0], rolled)):
        return "rolled"
    same = bool((last == last[counted][0])[counted].all()) if bool(counted.any()) else False
    repeated = bool((last == x[:, -1])[counted].all())
    varied = int(y[:, :-1].unique().numel()) > 4
    return "last_constant" if (same or repeated) and varied else None


def runs_at_the_ends(batches: Sequence[Batch], ignore: int) -> tuple[int, int, float] | None:
    """An id that most rows end or begin with several times over: the id, in how many rows, how often on average."""
    x, y = (torch.cat([batch[part].detach().cpu().long() for batch in batches]) for part in (0, 1))
    for side in (y, x.flip(1)):
        index = int(side[:, -1].mode().values)
        run = trailing_run(side == index).sum(1)
        long = run >= SHORTEST
        if index != ignore and 2 * int(long.sum()) > side.size(0) >= LEAST_ROWS:
            return index, int(long.sum()), float(run[long].float().mean())
    return None


def same_rows(drawn: Sequence[Batch]) -> Finding | None:
    """GG605 where each batch holds mostly rows of the one before, in whichever order; constant ids say nothing.

    A small set that is gone through again and again has other rows in neighbouring batches.
    """
    same = [x.detach().cpu().long() for x, _ in drawn if x.dim() == 2 and x.shape == drawn[0][0].shape]
    if len(same) < 3 or same[0].size(0) < 2 or same[0].size(1) < 4 or int(same[0].unique().numel()) < 3:
        return None
    shared = [
        float((one[:, None] == other).all(-1).any(0).float().mean()) for one, other in pairwise(same) if one.size(0)
    ]
    often = sum(share > 0.5 for share in shared)
    if 2 * often <= len(shared):
        return None
    different = int(torch.cat(same).unique(dim=0).size(0))
    total = sum(part.size(0) for part in same)
    seen = f"{total} rows were drawn in {len(same)} batches, {different} of them are different"
    return finding("GG605", seen, likely=["reordered"], evidence={"rows": total, "different": different})
