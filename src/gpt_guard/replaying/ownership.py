"""Whose the non-finite values of a result are: an input's, or the operation's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.replaying.memory import Bad, Maker, NonFiniteOrigin, merged
from gpt_guard.replaying.operations import CARRIES, DETERMINANTS, MOVES, Op, names
from gpt_guard.replaying.values import Flags, bad

# A row that is a mask throughout stays one in them.
_KEEPS_MASKS = MOVES | names("_log_softmax logsumexp cummax cummin logcumsumexp to_sparse")

_ADDS = names("addmm baddbmm addbmm addmv")


class Read(NamedTuple):
    """An input of an operation: itself, its values as they were before, and the non-finite ones among them."""

    name: str
    tensor: Tensor
    values: Tensor
    bad: Bad | None
    maker: Maker | None


class Whose(NamedTuple):
    """Those who made the bad values of a result; `owner` holds for each element 1 + the place of its origin, or 0."""

    origins: tuple[NonFiniteOrigin, ...]
    owner: Tensor | None = None


class Result(NamedTuple):
    """A result that holds non-finite values."""

    tensor: Tensor
    flags: Flags


def whose(
    op: Op, bound: dict[str, Any], reads: list[Read], result: Result, made: Callable[[], NonFiniteOrigin]
) -> Whose:
    """The origins of a bad result, `made()` among them where the operation itself made non-finite values.

    An operation that works element by element is asked for each element: an input whose bad values were not selected,
    or lie elsewhere, is not blamed. A mask never explains a NaN: the operation that made NaN of it does.
    """
    tainted = [read for read in reads if read.bad is not None]
    if not tainted:
        return Whose((made(),))
    if op.base == "where" and result.flags.nan and _by_determinant(reads):
        return Whose((made(),))
    if op.base in CARRIES and not op.writes and len({read.bad for read in tainted}) > 1:
        found = _by_moving(op, bound, tainted, result)
        if found is not None:
            return found
    if op.pointwise or op.base in ("where", "masked_fill"):
        found = _by_element(bound, tainted, result, made)
        if found is not None:
            return found
    return Whose(_by_kind(op, tainted, result.flags, made))


def _by_determinant(reads: list[Read]) -> bool:
    """Whether what is selected by was computed from the sign of a determinant."""
    makers = (read.maker for read in reads if read.name == "condition" and read.maker is not None)
    return any(maker.behind(DETERMINANTS, 3) is not None for maker in makers)


def _by_kind(
    op: Op, tainted: list[Read], flags: Flags, made: Callable[[], NonFiniteOrigin]
) -> tuple[NonFiniteOrigin, ...]:
    hard = [read.bad for read in tainted if read.bad is not None and not read.bad.deliberate]
    soft = [read.bad for read in tainted if read.bad is not None and read.bad.deliberate]
    if hard:
        # Of a NaN, an input that holds NaN is the nearer explanation.
        hard.sort(key=lambda found: flags.nan and not found.flags.nan)
        keeps = [found.origins for found in soft] if op.base in MOVES else []
        only_nan = flags.nan and not (flags.pos_inf or flags.neg_inf)
        return merged([*(_of_nan(found) if only_nan else found.origins for found in hard), *keeps])
    if flags.nan:
        nan = [found.origins for found in soft if found.flags.nan]
        return merged(nan) if nan else (made(),)
    # A mask that is added to a product stays one.
    added = op.base in _ADDS and all(read.name == "self" for read in tainted)
    return merged(found.origins for found in soft) if added or op.base in _KEEPS_MASKS else (made(),)


def _by_element(
    bound: dict[str, Any], tainted: list[Read], result: Result, made: Callable[[], NonFiniteOrigin]
) -> Whose | None:
    out = bad(result.tensor)
    if out is None:
        return None
    nan = result.tensor.detach().isnan()
    groups: list[tuple[tuple[NonFiniteOrigin, ...], Tensor]] = []
    rest = out
    for read in tainted:
        values = bad(read.values)
        if values is None or read.bad is None or not _fits(values, out):
            return None
        selected = _selected(bound, read, values)
        if read.bad.deliberate:
            # An infinity that was put there explains an infinity, and a NaN only another NaN.
            selected = selected & (~nan | read.values.detach().isnan())
        explains = out & selected
        for origins, part in ((_of_nan(read.bad), explains & nan), (read.bad.origins, explains & ~nan)):
            if bool(part.any()):
                groups.append((origins, part))
        rest = rest & ~explains
    if bool(rest.any()):
        groups.append(((made(),), rest))
    origins = merged(group for group, _ in groups)
    return Whose(origins, _owner(origins, groups, out) if len(groups) > 1 else None)


def _of_nan(found: Bad) -> tuple[NonFiniteOrigin, ...]:
    """Of the origins of a tensor, those that can have made NaN: beside others, a mask of infinities has not."""
    able = tuple(origin for origin in found.origins if not origin.deliberate or origin.cause == "filled")
    return able or found.origins


def _by_moving(op: Op, bound: dict[str, Any], tainted: list[Read], result: Result) -> Whose | None:
    """Of an operation that only moves values, the same done to the numbers of their origins."""
    origins = merged(read.bad.origins for read in tainted if read.bad is not None)
    numbers: dict[int, Tensor] = {}
    for read in tainted:
        values = bad(read.values)
        if values is None or read.bad is None or id(read.tensor) in numbers:
            return None
        numbers[id(read.tensor)] = values.to(read.values.dtype) * (1 + origins.index(read.bad.origins[0]))
    moved = op.func(*(_numbered(bound[name], numbers) for name in op.arguments if name in bound))
    if not isinstance(moved, Tensor) or moved.shape != result.tensor.shape:
        return None
    owner = moved.to(torch.uint8)
    present = [place for place in range(1, 1 + len(origins)) if bool((owner == place).any())]
    return Whose(tuple(origins[number - 1] for number in present), _renumbered(owner, present)) if present else None


def _numbered(value: Any, numbers: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        found = numbers.get(id(value))
        return found if found is not None else torch.zeros_like(value) if value.is_floating_point() else value
    return [_numbered(part, numbers) for part in value] if isinstance(value, (list, tuple)) else value


def _renumbered(owner: Tensor, present: list[int]) -> Tensor:
    renumbered = torch.zeros_like(owner)
    for place, number in enumerate(present, start=1):
        renumbered.masked_fill_(owner == number, place)
    return renumbered


def _owner(
    origins: tuple[NonFiniteOrigin, ...], groups: list[tuple[tuple[NonFiniteOrigin, ...], Tensor]], out: Tensor
) -> Tensor:
    owner = torch.zeros(out.shape, dtype=torch.uint8, device=out.device)
    # Where two explain an element, the first does.
    for group, explains in reversed(groups):
        owner.masked_fill_(explains, 1 + origins.index(group[0]))
    return owner


def _fits(values: Tensor, out: Tensor) -> bool:
    """Whether a tensor can be broadcast to the shape of the result."""
    shape = (1,) * (out.dim() - values.dim()) + tuple(values.shape)
    return len(shape) == out.dim() and all(a in (1, b) for a, b in zip(shape, out.shape, strict=True))


def _selected(bound: dict[str, Any], read: Read, values: Tensor) -> Tensor:
    """The elements of an input that `where` and `masked_fill` let through; all of them for other operations."""
    condition, mask = bound.get("condition"), bound.get("mask")
    if isinstance(condition, Tensor) and read.name in ("self", "other"):
        return values & (condition if read.name == "self" else ~condition)
    if isinstance(mask, Tensor) and read.name == "self":
        return values & ~mask
    return values
