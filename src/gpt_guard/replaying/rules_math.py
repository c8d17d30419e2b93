"""Why a function of single numbers failed: logarithms, roots, powers, exp, inverse functions, casts."""

from __future__ import annotations

import math

import torch

from gpt_guard.replaying.case import Case, Evidence, Facts
from gpt_guard.replaying.rules_arithmetic import Rule, by_zero, dtype, facts_of, overflow
from gpt_guard.replaying.schema import names
from gpt_guard.replaying.values import count, figure, limit, many
from gpt_guard.replaying.words import word_for

PROBABILITIES = names("_softmax _safe_softmax sigmoid")
_DRAWS = names("rand rand_like uniform exponential bernoulli")


def _log(case: Case) -> Evidence | None:
    shift = 1.0 if case.op.base == "log1p" else 0.0
    name = "other" if case.op.base in ("xlogy", "special_xlog1py") else "self"
    values = case.tensor(name)
    if values is None:
        return None
    word, zeros = word_for(case.op.base), count(values == -shift)
    # A complex number has a logarithm unless it is 0.
    negative = 0 if values.is_complex() else count(values < -shift)
    facts = facts_of(zeros=zeros, negative=negative)
    if negative and bool(case.out.isnan().any()):
        lowest = f"lowest {figure(float(values.min()))}"
        return Evidence(
            f"{word} of {many(negative, 'negative number')} ({lowest})",
            ("log_of_negative", "log_of_zero"),
            {name: facts},
        )
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
        return Evidence(
            f"{word} of {zero}; the eps {lost:g} is 0 in {dtype(values)}", ("eps_lost", *causes), {name: facts}
        )
    return Evidence(f"{word} of {zero}", causes, {name: facts})


def _root(case: Case) -> Evidence | None:
    values = case.tensor("self")
    if values is None:
        return None
    negative, zeros = count(values < 0), count(values == 0)
    facts = {"self": facts_of(zeros=zeros, negative=negative)}
    if negative and case.result.flags.nan:
        lowest = f"lowest {figure(float(values.min()))}"
        return Evidence(
            f"{case.op.base} of {many(negative, 'negative number')} ({lowest})", ("root_of_negative",), facts
        )
    if zeros and case.op.base == "rsqrt":
        return by_zero(case, "self", f"1 / sqrt of {many(zeros, 'zero')}", facts)
    return None


def _power(case: Case) -> Evidence | None:
    base, exponent = case.tensor("self"), case.number("exponent")
    if base is None or exponent is None:
        base = base if base is not None else torch.tensor(case.number("self") or 0.0)
        powers = case.tensor("exponent")
        if powers is None:
            return None
        negative, zeros = count((base < 0) & (powers != powers.round())), count((base == 0) & (powers < 0))
        shown = "fractional and negative powers"
    else:
        negative = count(base < 0) if exponent != int(exponent) else 0
        zeros = count(base == 0) if exponent < 0 else 0
        shown = f"the power of {exponent:g}"
    facts = {"self": facts_of(zeros=zeros, negative=negative)}
    if negative and case.result.flags.nan:
        return Evidence(f"{many(negative, 'negative number')} to {shown}", ("pow_of_negative",), facts)
    if zeros:
        return Evidence(f"{many(zeros, 'zero')} to {shown}", ("zero_to_negative", "division_by_zero"), facts)
    return None


def _exp(case: Case) -> Evidence | None:
    values = case.tensor("self")
    if values is None or not (case.result.flags.pos_inf or case.op.base == "sinh"):
        return None
    base = {"exp2": 2.0}.get(case.op.base, math.e)
    most = math.log(limit(case.out.dtype), base)
    top = float(values.max())
    if top <= most * 0.99:
        return None
    facts: Facts = {"self": (f"largest {figure(top)}, the limit of {dtype(case.out)} is {most:.1f}",)}
    shows = f"{case.op.base} of {figure(top)}; in {dtype(case.out)} it overflows above {most:.1f}"
    return Evidence(shows, ("exp_overflow", "lr_too_high"), facts)


def _cast(case: Case) -> Evidence | None:
    name = "src" if case.op.base == "copy" else "self"
    values = case.tensor(name)
    if values is None or not case.out.is_floating_point():
        return None
    finite = values[torch.isfinite(values)]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    if most <= limit(case.out.dtype):
        return None
    shows = f"a cast to {dtype(case.out)} of {figure(most)}, beyond its range of {figure(limit(case.out.dtype))}"
    beyond = count(values.abs() > limit(case.out.dtype))
    return Evidence(shows, ("cast_overflow", "lr_too_high"), {name: (f"{many(beyond, 'value')} beyond the range",)})


def _logit(case: Case) -> Evidence | None:
    values = case.tensor("self")
    if values is None:
        return None
    edges, outside = count((values == 0) | (values == 1)), count((values < 0) | (values > 1))
    if outside:
        return Evidence(f"logit of {many(outside, 'value')} outside of [0, 1]", ("outside_domain",))
    return Evidence(f"logit of {many(edges, 'value')} at 0 or 1", ("outside_domain", "log_of_zero")) if edges else None


def _domain(case: Case) -> Evidence | None:
    values = case.tensor("self")
    if values is None:
        return None
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


def _gamma(case: Case) -> Evidence | None:
    """The gamma function has its poles at 0 and at the negative integers, and so have those derived from it."""
    values = case.tensor("self")
    poles = 0 if values is None else count((values <= 0) & (values == values.round()))
    if not poles:
        return None
    shows = f"{word_for(case.op.base)} of {many(poles, 'value')} at 0 or a negative integer"
    return Evidence(shows, ("outside_domain",), {"self": (f"{poles} at 0 or a negative integer",)})


RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(names("log log2 log10 log1p xlogy special_xlog1py"), (_log,)),
    **dict.fromkeys(names("sqrt rsqrt"), (_root,)),
    "pow": (_power, overflow),
    **dict.fromkeys(names("exp expm1 exp2 sinh cosh"), (_exp,)),
    **dict.fromkeys(names("_to_copy copy"), (_cast,)),
    **dict.fromkeys(names("acos asin acosh atanh erfinv"), (_domain,)),
    **dict.fromkeys(names("lgamma digamma polygamma special_digamma"), (_gamma,)),
    "logit": (_logit,),
}
