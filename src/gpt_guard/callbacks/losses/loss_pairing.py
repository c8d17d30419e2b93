"""Which target each score is compared with: in what order the two were flattened, and by how much they are shifted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.losses.layout import Layout, layout_of
from gpt_guard.callbacks.losses.loss_calls import ClassIds, Ids, Seen, Told
from gpt_guard.callbacks.losses.shift import SURE, find_shift
from gpt_guard.records import Severity

MIN_POSITIONS = 24
"""By chance two binary sequences agree in 90 % of so many places once in 30 000 tries."""
_IGNORED = -100
_MOST_POSITIONS = 2**16
_WORDS = {0: "no_shift", 2: "double_shift", -1: "backward"}


class Pairing(NamedTuple):
    """Targets against ids `[B, T]`: target of position t is token t + `shift`, in `share` of `positions`."""

    shift: int
    share: float
    positions: int
    ids: Tensor
    certain: bool


class Grid(NamedTuple):
    """Targets laid out over the positions of the ids that their scores were computed from, both `[B, T]`."""

    ids: Tensor
    targets: Tensor
    certain: bool


def grids(known: ClassIds, seen: Seen) -> list[Grid]:
    """For each of the embedded ids of the same sizes; where the graph tells nothing, scores are taken in order."""
    layout = _layout(known)
    if layout is None or layout.classes != "whole":
        layout, certain = None, False
    else:
        certain = True
    found: list[Grid] = []
    for each in _distinct(seen.ids):
        targets = _in_order(known, each) if layout is None else _placed(known, layout, each)
        if targets is not None:
            found.append(Grid(each.cpu(), targets, certain))
    return found


def pairing(found: list[Grid]) -> Pairing | None:
    """The shift of these targets, 1 if any ids fit that; None if no shift is sure."""
    pairs = [pair for grid in found if (pair := _shift_of(grid)) is not None]
    return next((pair for pair in pairs if pair.shift == 1), pairs[0] if pairs else None)


def other_order(known: ClassIds, seen: Seen) -> Told | None:
    """Targets fit these ids in another order than that in which the scores were flattened."""
    layout = _layout(known)
    if layout is None or layout.classes != "whole":
        return None
    d0, d1 = layout.shape
    total = known.targets.numel()
    if total != d0 * d1 or min(d0, d1) < 2:
        return None
    flat = known.targets.detach().reshape(-1).long().cpu()
    flat = flat.masked_fill(flat == known.ignore_index, _IGNORED)
    natural = (d0, d1)
    for each in _distinct(seen.ids):
        rows, length = each.shape
        if (rows, length) not in ((d0, d1), (d1, d0)):
            continue
        natural = (rows, length)
        own = _placed(known, layout, each)
        orders = {"logits_transposed": flat.view(rows, length), "targets_transposed": flat.view(length, rows).t()}
        for key, targets in orders.items():
            if own is not None and torch.equal(own, targets):
                # This is the order that the scores are in: too few of the targets fit it to be sure, not another.
                continue
            pair = _shift_of(Grid(each.cpu(), targets, certain=True))
            if pair is not None and pair.shift in (0, 1):
                return _flattened(key, layout, pair.share)
    return _by_shape(known, seen, layout, natural)


def _by_shape(known: ClassIds, seen: Seen, layout: Layout, natural: tuple[int, int]) -> Told | None:
    """Labels of another kind than the ids: only the shapes before flattening tell, and only where B is not T."""
    d0, d1 = layout.shape
    source = seen.shape_of(known.targets)
    if source is None or d0 == d1 or known.targets.dim() != 1:
        return None
    if source not in ((d0, d1), (d1, d0)):
        return None
    rows = layout.flat if source == (d0, d1) else layout.second * d0 + layout.first
    if bool((rows == torch.arange(d0 * d1)).all()):
        return None
    return _flattened("logits_transposed" if source == natural else "targets_transposed", layout, None)


def _flattened(key: str, layout: Layout, share: float | None) -> Told:
    d0, d1 = layout.shape
    row = int(layout.first[1]), int(layout.second[1])
    fits = f" Taken in the other order, {share:.0%} of the targets fit the ids." if share is not None else ""
    seen = (
        f"The model computes scores [{d0}, {d1}, C]; row 1 of the flattened ones is position {row}, and the second "
        f"target belongs to another position.{fits}"
    )
    return Told("GG654", seen, (key,), evidence={"shape": [d0, d1], "share": share})


def shifted(pair: Pairing, *, causal: bool | None, recurrent: bool) -> Told:
    """GG653 for a shift that is not 1; an error only for a model that was seen to be causal."""
    words = {0: "its own token", 2: "token t+2"}.get(pair.shift, f"token t{pair.shift:+d}")
    how = {
        True: "The model is causal: later tokens do not change earlier scores.",
        False: "The model sees later tokens as well: a task of filling in or copying may be meant.",
        None: "Whether the model is causal could not be seen.",
    }[causal]
    seen = (
        f"The target of position t is {words} in {pair.share:.0%} of {pair.positions} positions, where the next token "
        f"is expected. {how}"
    )
    severity = Severity.INFO if causal is not True else Severity.ERROR if pair.shift in (0, 2) else Severity.WARNING
    if recurrent and pair.shift < 0:
        severity = Severity.INFO  # to echo what was read before is a task of its own
    elif causal is True and not pair.certain:
        severity = Severity.WARNING
    evidence = {"shift": pair.shift, "share": pair.share, "positions": pair.positions, "causal": causal}
    return Told("GG653", seen, (_WORDS.get(pair.shift, "roll"),), severity, evidence)


def _layout(known: ClassIds) -> Layout | None:
    if known.targets.numel() > _MOST_POSITIONS:
        return None
    return layout_of(known.scores, known.dim)


def _distinct(ids: list[Ids]) -> list[Tensor]:
    found: list[Tensor] = []
    for each in ids:
        if not any(torch.equal(each.ids, other) for other in found if each.ids.device == other.device):
            found.append(each.ids)
    return found


def _placed(known: ClassIds, layout: Layout, ids: Tensor) -> Tensor | None:
    """Each target at the position that its scores come from, in the orientation of the ids."""
    shape = layout.shape
    if tuple(ids.shape) not in (shape, shape[::-1]):
        return None
    targets = known.targets.detach().reshape(-1).long().cpu()
    if targets.numel() != layout.flat.numel():
        return None
    grid = torch.full((shape[0] * shape[1],), _IGNORED)
    grid[layout.flat] = targets.masked_fill(targets == known.ignore_index, _IGNORED)
    laid = grid.view(shape)
    return laid if tuple(ids.shape) == shape else laid.t()


def _in_order(known: ClassIds, ids: Tensor) -> Tensor | None:
    if known.targets.numel() != ids.numel() or ids.numel() > _MOST_POSITIONS:
        return None
    targets = known.targets.detach().reshape(ids.shape).long().cpu()
    return targets.masked_fill(targets == known.ignore_index, _IGNORED)


def _shift_of(grid: Grid) -> Pairing | None:
    # Time runs along the second dimension, or along the first where the model is not batch_first.
    pairs: list[Pairing] = []
    for ids, targets in ((grid.ids, grid.targets), (grid.ids.t(), grid.targets.t())):
        found = find_shift(ids, targets, _IGNORED)
        if found.shift is not None and found.share >= SURE and found.positions >= MIN_POSITIONS:
            pairs.append(Pairing(found.shift, found.share, found.positions, ids, grid.certain))
    return next((pair for pair in pairs if pair.shift == 1), pairs[0] if pairs else None)
