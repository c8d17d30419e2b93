"""Why arithmetic failed: divisions by 0, infinities of a mask that are computed with, results beyond the range."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpt_guard.replaying.case import Case, Evidence
from gpt_guard.replaying.schema import names
from gpt_guard.replaying.values import count, dead_rows, dead_text, figure, limit, many
from gpt_guard.replaying.words import word_for

Rule = Callable[[Case], Evidence | None]
_SPREADS = names("std var std_mean var_mean")
_NORMS = names("linalg_vector_norm norm")
_ROOTS, _SQUARES, _DIFFERENCES = names("sqrt rsqrt"), names("pow mul square"), names("sub rsub")
_COUNTS = names("sum count_nonzero nansum")
_WIDE_RANGE = 1e30
# A divisor below it makes the quotient more than 100 times as large.
_LITTLE = 1e-2
PRODUCTS = names("mm addmm bmm baddbmm addbmm mv addmv dot vdot convolution _convolution mkldnn_convolution")
_SUMS = names("sum mean cumsum pow linalg_vector_norm norm var std var_mean prod mse_loss square")
_OVERFLOWS = dict.fromkeys(PRODUCTS, "matmul_overflow") | dict.fromkeys(_SUMS, "sum_overflow")


def _division(case: Case) -> Evidence | None:
    name = "self" if case.op.base == "reciprocal" else "other"
    divisor = case.tensor(name)
    if divisor is None:
        number = case.number(name)
        if number != 0:
            return None
        return Evidence("division by the number 0", ("division_by_zero", "empty_count"))
    zeros = count(divisor == 0)
    if not zeros:
        return _by_little(case, name, divisor)
    top = case.tensor("self") if name == "other" else None
    nothing = count((top == 0) & (divisor == 0)) if top is not None else 0
    both = f" (0 / 0 in {many(nothing, 'element')})" if nothing else ""
    return by_zero(case, name, f"division by {many(zeros, 'zero')}{both}", {name: facts_of(zeros=zeros)})


def _by_little(case: Case, name: str, divisor: Tensor) -> Evidence | None:
    """A divisor that is not 0 and still too small for the dtype's range."""
    least = float(divisor.abs().min())
    reached = case.exceeds()
    if reached is None or least >= _LITTLE:
        return None
    shows = f"division by numbers as small as {figure(least)} reached {figure(reached)}, beyond"
    return Evidence(
        f"{shows} {figure(limit(case.out.dtype))}, the largest {dtype(case.out)}",
        ("tiny_divisor", "overflow"),
        {name: (f"smallest magnitude {figure(least)}",)},
    )


def by_zero(case: Case, name: str, shows: str, facts: dict[str, tuple[str, ...]]) -> Evidence:
    """What the divisor was computed by tells why it is 0."""
    causes: list[str] = []
    if (lost := case.lost_eps(name)) is not None:
        values = case.tensor(name)
        shows += f"; the eps {lost:g} is 0 in {dtype(values)}" if values is not None else ""
        causes.append("eps_lost")
    if case.behind(name, _SPREADS) is not None:
        causes.append("zero_std")
    elif case.behind(name, _NORMS) is not None:
        causes.append("norm_zero")
    elif (root := case.behind(name, _ROOTS, 3)) is not None and (square := root.behind(_SQUARES)) is not None:
        # Written out: a deviation is a norm of what the mean was taken from.
        centred = any(each.name in _DIFFERENCES for each in square.inputs)
        causes += ["zero_std", "norm_zero"] if centred else ["norm_zero"]
    elif case.behind(name, _COUNTS, 3) is not None:
        causes.append("empty_count")
    return Evidence(shows, (*causes, "division_by_zero"), facts)


def _infinities(case: Case) -> Evidence | None:
    """A sum, difference or product of infinities that are a mask."""
    if not case.masks or not case.result.flags.nan:
        return None
    special = tuple(origin.cause for origin in case.masks if origin.cause is not None)
    facts: dict[str, tuple[str, ...]] = {}
    for name in ("self", "other"):
        values = case.tensor(name)
        if values is not None and values.dim() and dead_rows(values, -1)[0]:
            facts[name] = (dead_text(values, -1),)
    rows = next(iter(facts.values()), ("",))[0]
    times = case.op.base in ("mul", "div")
    shows = "0 times an infinity" if times else "an infinity minus an infinity"
    first = "zero_times_inf" if times else "inf_minus_inf"
    return Evidence(
        f"{shows}, {many(count(case.out.isnan()), 'time')}" + (f"; {rows}" if rows else ""),
        (first, *special, "fully_masked_row", "mask_used"),
        facts,
    )


def _both_min(case: Case) -> Evidence | None:
    """Two masks of the dtype's minimum, added, or one to scores."""
    if not case.result.flags.neg_inf or not adds_least(case):
        return None
    if len(_least(case)) == 1:
        least = figure(-limit(case.out.dtype))
        return Evidence(
            f"a mask of {least} was added to negative values: the sum is beyond {dtype(case.out)}'s range",
            ("two_masks_added", "overflow"),
        )
    return Evidence(
        f"two masks of about {figure(-limit(case.out.dtype))} were added: the sum is beyond {dtype(case.out)}'s range",
        ("two_masks_added", "overflow"),
    )


def adds_least(case: Case) -> bool:
    """Whether a summand reaches down to about the dtype's minimum, as a mask does."""
    return bool(_least(case))


def _least(case: Case) -> list[float]:
    values = (case.tensor(name) for name in ("self", "other"))
    lowest = [float(each.min()) for each in values if each is not None and each.numel()]
    return [low for low in lowest if low <= -limit(case.out.dtype) / 2]


def overflow(case: Case) -> Evidence | None:
    """The result in a wider dtype is finite, and it or a step on the way to it is beyond this one's range."""
    most = case.wider()
    if most is None:
        return None
    wide = limit(case.out.dtype) > _WIDE_RANGE
    first = _OVERFLOWS.get(case.op.base, "overflow")
    keys = ("lr_too_high", first) if wide else (first, "lr_too_high")
    if most <= limit(case.out.dtype):
        wider = "float32" if case.out.dtype is torch.float16 else "float64"
        shows = f"{word_for(case.op.base)} is {figure(most)} in {wider}: a step on the way there was beyond"
        return Evidence(f"{shows} {figure(limit(case.out.dtype))}, the largest {dtype(case.out)}", ("overflow", *keys))
    shows = f"{word_for(case.op.base)} reached {figure(most)}, beyond {figure(limit(case.out.dtype))}"
    return Evidence(f"{shows}, the largest {dtype(case.out)}", keys)


def dtype(tensor: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def facts_of(*, zeros: int = 0, negative: int = 0) -> tuple[str, ...]:
    """Zeros and negatives as facts about an operand."""
    found = []
    if zeros:
        found.append(many(zeros, "zero"))
    if negative:
        found.append(f"{negative} negative")
    return tuple(found)


RULES: dict[str, tuple[Rule, ...]] = {
    "div": (_infinities, _division, overflow),
    "reciprocal": (_division, overflow),
    "add": (_infinities, _both_min, overflow),
    "sub": (_infinities, overflow),
    "rsub": (_infinities, overflow),
    "mul": (_infinities, overflow),
}
