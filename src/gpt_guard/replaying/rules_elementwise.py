"""Why an operation on single numbers failed: arithmetic, logarithms, roots, powers, exp, inverse functions, casts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt_guard.replaying.failed_operation import Evidence, Facts, FailedOperation, Rule
from gpt_guard.replaying.operations import names, word_for
from gpt_guard.replaying.values import count, dead_rows, dead_text, dtype_of, figure, limit, many

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
PROBABILITIES = names("_softmax _safe_softmax sigmoid")
_DRAWS = names("rand rand_like uniform exponential bernoulli")


def _division(case: FailedOperation) -> Evidence | None:
    name = "self" if case.op.base == "reciprocal" else "other"
    divisor = case.optional(name)
    if divisor is None:
        zero = case.number(name) == 0
        return Evidence("division by the number 0", ("division_by_zero", "empty_count")) if zero else None
    zeros = count(divisor == 0)
    if not zeros:
        return _by_little(case, name, divisor)
    top = case.optional("self") if name == "other" else None
    nothing = count((top == 0) & (divisor == 0)) if top is not None else 0
    both = f" (0 / 0 in {many(nothing, 'element')})" if nothing else ""
    return _by_zero(case, name, f"division by {many(zeros, 'zero')}{both}", {name: _facts(zeros=zeros)})


def _by_little(case: FailedOperation, name: str, divisor: Tensor) -> Evidence | None:
    """A divisor that is not 0 and still too small for the dtype's range."""
    least = float(divisor.abs().min())
    reached = case.exceeds()
    if reached is None or least >= _LITTLE:
        return None
    shows = f"division by numbers as small as {figure(least)} reached {figure(reached)}, {case.beyond}"
    return Evidence(shows, ("tiny_divisor", "overflow"), {name: (f"smallest magnitude {figure(least)}",)})


def _by_zero(case: FailedOperation, name: str, shows: str, facts: dict[str, tuple[str, ...]]) -> Evidence:
    """What the divisor was computed by tells why it is 0."""
    causes: list[str] = []
    if (lost := case.lost_eps(name)) is not None:
        shows += f"; the eps {lost:g} is 0 in {dtype_of(case.tensor(name))}"
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


def _infinities(case: FailedOperation) -> Evidence | None:
    """A sum, difference or product of infinities that are a mask."""
    if not case.masks or not case.result.flags.nan:
        return None
    facts: dict[str, tuple[str, ...]] = {}
    for name in ("self", "other"):
        values = case.optional(name)
        if values is not None and values.dim() and dead_rows(values, -1)[0]:
            facts[name] = (dead_text(values, -1),)
    rows = next(iter(facts.values()), ("",))[0]
    times = case.op.base in ("mul", "div")
    shows = "0 times an infinity" if times else "an infinity minus an infinity"
    first = "zero_times_inf" if times else "inf_minus_inf"
    return Evidence(
        f"{shows}, {many(count(case.out.isnan()), 'time')}" + (f"; {rows}" if rows else ""),
        (first, *case.mask_causes, "fully_masked_row", "mask_used"),
        facts,
    )


def _both_min(case: FailedOperation) -> Evidence | None:
    """Two masks of the dtype's minimum, added, or one to scores."""
    if not case.result.flags.neg_inf or not adds_least(case):
        return None
    least = figure(-limit(case.out.dtype))
    one = f"a mask of {least} was added to negative values"
    shows = one if len(_least(case)) == 1 else f"two masks of about {least} were added"
    return Evidence(f"{shows}: the sum is beyond {dtype_of(case.out)}'s range", ("two_masks_added", "overflow"))


def adds_least(case: FailedOperation) -> bool:
    """Whether a summand reaches down to about the dtype's minimum, as a mask does."""
    return bool(_least(case))


def _least(case: FailedOperation) -> list[float]:
    values = (case.optional(name) for name in ("self", "other"))
    lowest = [float(each.min()) for each in values if each is not None and each.numel()]
    return [low for low in lowest if low <= -limit(case.out.dtype) / 2]


def overflow(case: FailedOperation) -> Evidence | None:
    """The result in a wider dtype is finite, and it or a step on the way to it is beyond this one's range."""
    most = case.wider()
    if most is None:
        return None
    wide = limit(case.out.dtype) > _WIDE_RANGE
    first = _OVERFLOWS.get(case.op.base, "overflow")
    keys = ("lr_too_high", first) if wide else (first, "lr_too_high")
    if most <= limit(case.out.dtype):
        wider = "float32" if case.out.dtype is torch.float16 else "float64"
        shows = f"{word_for(case.op.base)} is {figure(most)} in {wider}: a step on the way there was {case.beyond}"
        return Evidence(shows, ("overflow", *keys))
    return Evidence(f"{word_for(case.op.base)} reached {figure(most)}, {case.beyond}", keys)


def _facts(*, zeros: int = 0, negative: int = 0) -> tuple[str, ...]:
    """Zeros and negatives as facts about an operand."""
    return tuple(([many(zeros, "zero")] if zeros else []) + ([f"{negative} negative"] if negative else []))


def _log(case: FailedOperation) -> Evidence | None:
    shift = 1.0 if case.op.base == "log1p" else 0.0
    name = "other" if case.op.base in ("xlogy", "special_xlog1py") else "self"
    values = case.tensor(name)
    word, zeros = word_for(case.op.base), count(values == -shift)
    # A complex number has a logarithm unless it is 0.
    negative = 0 if values.is_complex() else count(values < -shift)
    facts = _facts(zeros=zeros, negative=negative)
    if negative and bool(case.out.isnan().any()):
        lowest = f"lowest {figure(float(values.min()))}"
        shows = f"{word} of {many(negative, 'negative number')} ({lowest})"
        return Evidence(shows, ("log_of_negative", "log_of_zero"), {name: facts})
    if not zeros:
        return None
    zero = many(zeros, "value") + " at -1" if shift else many(zeros, "zero")
    if case.behind(name, PROBABILITIES) is not None:
        causes = ("log_of_probability", "log_of_zero")
    elif case.behind(name, _DRAWS, 2) is not None:
        causes = ("log_of_random", "log_of_zero")
    else:
        causes = ("log_of_zero", "log_of_probability")
    if (lost := case.lost_eps(name)) is not None:
        shows = f"{word} of {zero}; the eps {lost:g} is 0 in {dtype_of(values)}"
        return Evidence(shows, ("eps_lost", *causes), {name: facts})
    return Evidence(f"{word} of {zero}", causes, {name: facts})


def _root(case: FailedOperation) -> Evidence | None:
    values = case.tensor("self")
    negative, zeros = count(values < 0), count(values == 0)
    facts = {"self": _facts(zeros=zeros, negative=negative)}
    if negative and case.result.flags.nan:
        lowest = f"lowest {figure(float(values.min()))}"
        shows = f"{case.op.base} of {many(negative, 'negative number')} ({lowest})"
        return Evidence(shows, ("root_of_negative",), facts)
    if zeros and case.op.base == "rsqrt":
        return _by_zero(case, "self", f"1 / sqrt of {many(zeros, 'zero')}", facts)
    return None


def _power(case: FailedOperation) -> Evidence | None:
    base, exponent = case.optional("self"), case.number("exponent")
    if base is None or exponent is None:
        base = base if base is not None else torch.tensor(case.number("self") or 0.0)
        powers = case.tensor("exponent")
        negative, zeros = count((base < 0) & (powers != powers.round())), count((base == 0) & (powers < 0))
        shown = "fractional and negative powers"
    else:
        negative = count(base < 0) if exponent != int(exponent) else 0
        zeros = count(base == 0) if exponent < 0 else 0
        shown = f"the power of {exponent:g}"
    facts = {"self": _facts(zeros=zeros, negative=negative)}
    if negative and case.result.flags.nan:
        return Evidence(f"{many(negative, 'negative number')} to {shown}", ("pow_of_negative",), facts)
    if zeros:
        return Evidence(f"{many(zeros, 'zero')} to {shown}", ("zero_to_negative", "division_by_zero"), facts)
    return None


def _exp(case: FailedOperation) -> Evidence | None:
    values = case.tensor("self")
    if not (case.result.flags.pos_inf or case.op.base == "sinh"):
        return None
    base = {"exp2": 2.0}.get(case.op.base, math.e)
    most = math.log(limit(case.out.dtype), base)
    top = float(values.max())
    if top <= most * 0.99:
        return None
    facts: Facts = {"self": (f"largest {figure(top)}, the limit of {dtype_of(case.out)} is {most:.1f}",)}
    shows = f"{case.op.base} of {figure(top)}; in {dtype_of(case.out)} it overflows above {most:.1f}"
    return Evidence(shows, ("exp_overflow", "lr_too_high"), facts)


def _cast(case: FailedOperation) -> Evidence | None:
    name = "src" if case.op.base == "copy" else "self"
    values = case.tensor(name)
    if not case.out.is_floating_point():
        return None
    finite = values[torch.isfinite(values)]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    if most <= limit(case.out.dtype):
        return None
    shows = f"a cast to {dtype_of(case.out)} of {figure(most)}, beyond its range of {figure(limit(case.out.dtype))}"
    beyond = count(values.abs() > limit(case.out.dtype))
    return Evidence(shows, ("cast_overflow", "lr_too_high"), {name: (f"{many(beyond, 'value')} beyond the range",)})


def _logit(case: FailedOperation) -> Evidence | None:
    values = case.tensor("self")
    edges, outside = count((values == 0) | (values == 1)), count((values < 0) | (values > 1))
    if outside:
        return Evidence(f"logit of {many(outside, 'value')} outside of [0, 1]", ("outside_domain",))
    return Evidence(f"logit of {many(edges, 'value')} at 0 or 1", ("outside_domain", "log_of_zero")) if edges else None


def _domain(case: FailedOperation) -> Evidence | None:
    values = case.tensor("self")
    word = word_for(case.op.base)
    outside = count(values < 1) if case.op.base == "acosh" else count(values.abs() > 1)
    far = float(values.min()) if case.op.base == "acosh" else float(values.abs().max())
    if case.op.base in ("atanh", "erfinv") and not outside:
        edges = count(values.abs() == 1)
        return Evidence(f"{word} of {many(edges, 'value')} at -1 or 1", ("outside_domain",)) if edges else None
    if not outside:
        return None
    shows = f"{word} of {many(outside, 'value')} outside of its domain (furthest {far:.8g})"
    return Evidence(shows, ("outside_domain",), {"self": (f"{outside} outside of the domain",)})


def _gamma(case: FailedOperation) -> Evidence | None:
    """The gamma function has its poles at 0 and at the negative integers, and so have those derived from it."""
    values = case.tensor("self")
    poles = count((values <= 0) & (values == values.round()))
    if not poles:
        return None
    shows = f"{word_for(case.op.base)} of {many(poles, 'value')} at 0 or a negative integer"
    return Evidence(shows, ("outside_domain",), {"self": (f"{poles} at 0 or a negative integer",)})


RULES: dict[str, tuple[Rule, ...]] = {
    "div": (_infinities, _division, overflow),
    "reciprocal": (_division, overflow),
    "add": (_infinities, _both_min, overflow),
    "sub": (_infinities, overflow),
    "rsub": (_infinities, overflow),
    "mul": (_infinities, overflow),
    **dict.fromkeys(names("log log2 log10 log1p xlogy special_xlog1py"), (_log,)),
    **dict.fromkeys(names("sqrt rsqrt"), (_root,)),
    "pow": (_power, overflow),
    **dict.fromkeys(names("exp expm1 exp2 sinh cosh"), (_exp,)),
    **dict.fromkeys(names("_to_copy copy"), (_cast,)),
    **dict.fromkeys(names("acos asin acosh atanh erfinv"), (_domain,)),
    **dict.fromkeys(names("lgamma digamma polygamma special_digamma"), (_gamma,)),
    "logit": (_logit,),
}
