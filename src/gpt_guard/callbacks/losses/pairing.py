"""Which target each score is compared with: in what order the two were flattened, and by how much they are shifted.

A model predicts token t+1 from what stands up to t; whether another shift is wrong depends on whether the model is
causal, which is asked of the model itself, only where there is such a shift.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.data.batches import InputNames
from gpt_guard.callbacks.losses.calls import ClassIds
from gpt_guard.callbacks.losses.positions import ScorePositions, positions_of
from gpt_guard.hooks.functions.call_record import CallRecord
from gpt_guard.hooks.isolation.compare import difference, rounding
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Severity

SHIFTS = (1, 0, 2, -1, 3, -2, 4, 5, 6, 7, 8)
"""Looked for in this order; of those that fit equally well the first is meant."""
SURE = 0.9
"""Share of positions that fit: less is packed documents, whose last targets are not in the row."""
CLEAR = 0.25
"""A smaller share is enough where it is ahead of every other shift by as much: inputs with noise on purpose."""
MIN_TARGETS = 4
"""From fewer nothing is concluded."""
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


def positions(known: ClassIds) -> ScorePositions | None:
    """Where the rows of these scores come from; None where the graph does not tell, or it takes too long."""
    if known.targets.numel() > _MOST_POSITIONS:
        return None
    where = positions_of(known.scores, known.dim)
    return where if where is not None and where.classes == "whole" else None


def grids(known: ClassIds, where: ScorePositions | None, record: CallRecord) -> list[Grid]:
    """For each of the embedded ids of the same sizes; where the graph tells nothing, scores are taken in order."""
    found: list[Grid] = []
    for ids in _distinct(record):
        targets = _in_order(known, ids) if where is None else _placed(known, where, ids)
        if targets is not None:
            found.append(Grid(ids.cpu(), targets, where is not None))
    return found


def pairing(found: list[Grid]) -> Pairing | None:
    """The shift of these targets, 1 if any ids fit that; None if no shift is sure."""
    pairs = [pair for grid in found if (pair := _shift_of(grid)) is not None]
    return next((pair for pair in pairs if pair.shift == 1), pairs[0] if pairs else None)


def other_order(known: ClassIds, where: ScorePositions | None, record: CallRecord) -> CallIssue | None:
    """Targets fit these ids in another order than that in which the scores were flattened."""
    if where is None:
        return None
    d0, d1 = where.shape
    if known.targets.numel() != d0 * d1 or min(d0, d1) < 2:
        return None
    flat, natural = _targets(known), (d0, d1)
    for ids in _distinct(record):
        rows, length = ids.shape
        if (rows, length) not in ((d0, d1), (d1, d0)):
            continue
        natural = (rows, length)
        own = _placed(known, where, ids)
        orders = {"logits_transposed": flat.view(rows, length), "targets_transposed": flat.view(length, rows).t()}
        for key, targets in orders.items():
            if own is not None and torch.equal(own, targets):
                # This is the order that the scores are in: too few of the targets fit it to be sure, not another.
                continue
            pair = _shift_of(Grid(ids.cpu(), targets, certain=True))
            if pair is not None and pair.shift in (0, 1):
                return _flattened(key, where, pair.share)
    return _by_shape(known, where, natural, record)


def _by_shape(known: ClassIds, where: ScorePositions, natural: tuple[int, int], record: CallRecord) -> CallIssue | None:
    """Labels of another kind than the ids: only the shapes before flattening tell, and only where B is not T."""
    d0, d1 = where.shape
    source = record.flattened_from(known.targets)
    if source not in ((d0, d1), (d1, d0)) or d0 == d1 or known.targets.dim() != 1:
        return None
    rows = where.flat if source == (d0, d1) else where.second * d0 + where.first
    if bool((rows == torch.arange(d0 * d1)).all()):
        return None
    return _flattened("logits_transposed" if source == natural else "targets_transposed", where, None)


def _flattened(key: str, where: ScorePositions, share: float | None) -> CallIssue:
    d0, d1 = where.shape
    row = int(where.first[1]), int(where.second[1])
    fits = f" Taken in the other order, {share:.0%} of the targets fit the ids." if share is not None else ""
    text = (
        f"The model computes scores [{d0}, {d1}, C]; row 1 of the flattened ones is position {row}, and the second "
        f"target belongs to another position.{fits}"
    )
    return CallIssue("GG654", text, (key,), evidence={"shape": [d0, d1], "share": share})


def shifted(pair: Pairing, *, causal: bool | None, recurrent: bool) -> CallIssue:
    """GG653 for a shift that is not 1; an error only for a model that was seen to be causal."""
    words = {0: "its own token", 2: "token t+2"}.get(pair.shift, f"token t{pair.shift:+d}")
    how = {
        True: "The model is causal: later tokens do not change earlier scores.",
        False: "The model sees later tokens as well: a task of filling in or copying may be meant.",
        None: "Whether the model is causal could not be seen.",
    }[causal]
    text = (
        f"The target of position t is {words} in {pair.share:.0%} of {pair.positions} positions, where the next token "
        f"is expected. {how}"
    )
    severity = Severity.INFO if causal is not True else Severity.ERROR if pair.shift in (0, 2) else Severity.WARNING
    if recurrent and pair.shift < 0:
        severity = Severity.INFO  # to echo what was read before is a task of its own
    elif causal is True and not pair.certain:
        severity = Severity.WARNING
    evidence = {"shift": pair.shift, "share": pair.share, "positions": pair.positions, "causal": causal}
    return CallIssue("GG653", text, (_WORDS.get(pair.shift, "roll"),), severity, evidence)


def _distinct(record: CallRecord) -> list[Tensor]:
    found: list[Tensor] = []
    for each in record.embedded:
        if not any(torch.equal(each.ids, other) for other in found if each.ids.device == other.device):
            found.append(each.ids)
    return found


def _targets(known: ClassIds) -> Tensor:
    """All targets in a row, on the host."""
    flat = known.targets.detach().reshape(-1).long().cpu()
    return flat.masked_fill(flat == known.ignore_index, _IGNORED)


def _placed(known: ClassIds, where: ScorePositions, ids: Tensor) -> Tensor | None:
    """Each target at the position that its scores come from, in the orientation of the ids."""
    shape = where.shape
    if tuple(ids.shape) not in (shape, shape[::-1]) or known.targets.numel() != where.flat.numel():
        return None
    grid = torch.full((shape[0] * shape[1],), _IGNORED)
    grid[where.flat] = _targets(known)
    laid = grid.view(shape)
    return laid if tuple(ids.shape) == shape else laid.t()


def _in_order(known: ClassIds, ids: Tensor) -> Tensor | None:
    if known.targets.numel() != ids.numel() or ids.numel() > _MOST_POSITIONS:
        return None
    return _targets(known).view(ids.shape)


def _shift_of(grid: Grid) -> Pairing | None:
    # Time runs along the second dimension, or along the first where the model is not batch_first.
    pairs: list[Pairing] = []
    for ids, targets in ((grid.ids, grid.targets), (grid.ids.t(), grid.targets.t())):
        found = find_shift(ids, targets, _IGNORED)
        if found.shift is not None and found.share >= SURE and found.positions >= MIN_POSITIONS:
            pairs.append(Pairing(found.shift, found.share, found.positions, ids, grid.certain))
    return next((pair for pair in pairs if pair.shift == 1), pairs[0] if pairs else None)


class TargetShift(NamedTuple):
    """What was found: the shift, or None; the share of positions that fit it; how many there were; rows that do not."""

    shift: int | None
    share: float
    positions: int
    odd_rows: tuple[int, ...] = ()


def find_shift(x: Tensor, y: Tensor, ignore_index: int = -100, expected: int = 1) -> TargetShift:
    """The k for which y[:, t] is x[:, t + k], `[B, T]` both; targets of `ignore_index` are left out.

    Where several fit (constant or periodic rows), `expected` is found if it is one of them. Without positions, where
    fewer than MIN_TARGETS could show the expected shift. Reads the device.
    """
    x, y = x.long().cpu(), y.long().cpu()
    fits = {k: hits_of(x, y, k, ignore_index) for k in dict.fromkeys((expected, *SHIFTS))}
    shares = {k: float(hits.sum()) / float(known.sum()) for k, (hits, known) in fits.items() if known.sum() > 0}
    if fits[expected][1].sum() < MIN_TARGETS:
        return TargetShift(None, 0.0, 0)
    best = max(shares, key=lambda k: shares[k])  # the first of equals
    share, positions = shares[best], int(fits[best][1].sum())
    others = max((other for k, other in shares.items() if k != best), default=0.0)
    if share < SURE and (share < 0.5 or share - others < CLEAR):
        return TargetShift(None, share, positions)
    return TargetShift(best, share, positions, _odd_rows(fits, best))


def hits_of(x: Tensor, y: Tensor, k: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Hits and comparable targets of each row, `[B]` both."""
    length = x.size(1)
    if abs(k) >= length:
        nothing = torch.zeros(x.size(0), dtype=torch.int64)
        return nothing, nothing
    targets = y[:, : length - k] if k >= 0 else y[:, -k:]
    inputs = x[:, k:] if k >= 0 else x[:, : length + k]
    known = targets != ignore_index
    return ((targets == inputs) & known).sum(1), known.sum(1)


def _odd_rows(fits: dict[int, tuple[Tensor, Tensor]], best: int) -> tuple[int, ...]:
    """Rows in which this shift fails: another one holds, or none does while it is perfect in others.

    Inputs with noise on purpose miss about as much in every row.
    """
    hits, known = fits[best]
    perfect = (hits >= SURE * known) & (known >= 4)
    if 4 * int(perfect.sum()) >= hits.numel() and bool((lost := (hits < 0.3 * known) & (known >= 8)).any()):
        return tuple(lost.nonzero().flatten().tolist())
    fails = (hits < 0.5 * known) & (known >= 4)
    holds = torch.zeros_like(fails)
    for k, (other_hits, other_known) in fits.items():
        if k != best:
            holds |= (other_hits >= SURE * other_known) & (other_known >= 4)
    return tuple((fails & holds).nonzero().flatten().tolist())


def is_causal(watch: Watch, ids: Tensor) -> bool | None:
    """True if no earlier score changes with later tokens, False if one does, None if the model cannot be asked.

    Runs the model twice on the inputs of its last call, in eval mode and without gradient, the second time with other
    tokens in the second half of the rows; everything is put back. Reads the device.
    """
    inputs = watch.tap.inputs
    if inputs is None or ids.size(1) < 4:
        return None
    try:
        with watch.inspection.probing("causality of the targets"), torch.no_grad():
            # Not `.eval()`, which would be noted as the user's.
            for module in watch.model.modules():
                module.training = False
            return _ask(watch.model, inputs, ids)
    except Exception:  # a model that refuses other ids, or a second call; then nothing is known
        return None


def _ask(model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], ids: Tensor) -> bool | None:
    # Labels may hold the very same ids.
    data = InputNames(model).split(*inputs).data
    given = next((tensor for tensor in data.values() if _same(tensor, ids)), None)
    if given is None:
        return None
    turned = given.shape != ids.shape or not torch.equal(given.cpu(), ids)
    half = ids.size(1) // 2
    changed = ids.clone()
    # The same ids in another order are certainly in the vocabulary.
    changed[:, half:] = changed.roll(1, 0)[:, half:] if ids.size(0) > 1 else changed[:, half:].flip(1)
    if torch.equal(changed, ids):
        return None
    other = (changed.t() if turned else changed).to(given.device, given.dtype)
    before, after = _scores(model, inputs, ids), _scores(model, _with(inputs, given, other), ids)
    if before is None or after is None or before.shape != after.shape:
        return None
    if tuple(before.shape[:2]) != tuple(ids.shape):
        # Time comes first.
        before, after = before.transpose(0, 1), after.transpose(0, 1)
    apart = difference(before, after) > rounding(before)
    # Where not even the scores of the changed tokens change, the ids have not reached the model.
    return not bool(apart[:, :half].any()) if bool(apart[:, half:].any()) else None


def _same(tensor: Tensor, ids: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.dim() != 2:
        return False
    values = tensor.cpu()
    return any(each.shape == ids.shape and bool((each == ids).all()) for each in (values, values.t()))


def _with(inputs: Any, old: Tensor, new: Tensor) -> Any:
    args, kwargs = inputs
    return (
        tuple(new if each is old else each for each in args),
        {name: new if each is old else each for name, each in kwargs.items()},
    )


def _scores(model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], ids: Tensor) -> Tensor | None:
    """The first tensor of an output that has a score for each position."""
    output = model(*inputs[0], **inputs[1])
    sizes = (tuple(ids.shape), tuple(ids.shape)[::-1])
    tensors = [tensor for _, tensor in walk(output) if tensor.is_floating_point()]
    shaped = next((each for each in tensors if each.dim() >= 3 and tuple(each.shape[:2]) in sizes), None)
    if shaped is not None:
        return shaped
    flat = next((each for each in tensors if each.dim() == 2 and each.size(0) == ids.numel()), None)
    return None if flat is None else flat.view(*ids.shape, flat.size(1))
