"""Why a derivative failed while the forward was finite: read from what the forward was given, and from the gradient."""

from __future__ import annotations

from torch import Tensor

from gpt_guard.replaying.case import Case, Evidence
from gpt_guard.replaying.rules_arithmetic import dtype, overflow
from gpt_guard.replaying.schema import names
from gpt_guard.replaying.values import count, figure, limit, many
from gpt_guard.replaying.words import word_for, word_for_node

_WHERE = "where_unselected"
DEFINED_AT_ZERO = ("std", "norm")
_SUMS = frozenset({"sum", "mean"})
_SQUARES = frozenset({"pow", "mul", "square"})
_SPREADS = names("var std var_mean")
_DECOMPOSITIONS = ("LinalgEigh", "LinalgSvd", "LinalgQr", "LinalgEig", "LinalgInv", "LinalgSolve", "LinalgCholesky")


def name_of(case: Case) -> str:
    """The word for the forward operation that a derivative belongs to."""
    if case.forward is not None:
        return word_for(case.forward.base)
    return word_for_node(case.node or "")


def backward(case: Case) -> Evidence | None:
    """What the hazard seen in the forward explains; None if there was none and the result does not overflow either."""
    name = name_of(case)
    if name == "pow" and case.op.base == "log" and (base := case.tensor("self")) is not None and bool((base < 0).any()):
        negative = many(count(base < 0), "negative number")
        shows = f"the derivative of pow by its exponent is a logarithm, here of {negative}"
        return Evidence(shows, ("pow_of_negative", "log_of_negative"))
    # A zero elsewhere in the input explains no result that only the dtype is too small for.
    over, reached = overflow(case), case.exceeds()
    if over is not None and reached is not None:
        shows = f"a gradient of {name} reached {figure(reached)}, beyond {figure(limit(case.out.dtype))}"
        return Evidence(f"{shows}, the largest {dtype(case.out)}", ("gradient_overflow", *over.causes))
    divisor = case.tensor("other") if name in DEFINED_AT_ZERO and case.op.base == "div" else None
    if divisor is not None and bool((divisor != 0).any()):
        # torch leaves zeros out of these by itself.
        least = float(divisor[divisor != 0].abs().min())
        shows = f"the derivative of {name} divides by values as small as {figure(least)}"
        return Evidence(shows, ("gradient_overflow", "tiny_divisor"))
    found = case.forward.hazard if case.forward is not None else None
    if found is not None:
        causes = [*_refined(case, found.key), found.key]
        if _unselected(case):
            causes.insert(0, _WHERE)
        else:
            causes.append(_WHERE)
        shows = f"the derivative of {found.shows}"
        return Evidence(
            shows + (": the gradient that arrives there is 0" if causes[0] == _WHERE else ""), tuple(causes)
        )
    if any(kind in (case.node or "") for kind in _DECOMPOSITIONS):
        return Evidence(f"the derivative of {name}", ("decomposition", "singular_matrix"))
    return over


def _refined(case: Case, key: str) -> list[str]:
    """Of a root, what it was the root of."""
    maker = case.forward.maker if case.forward is not None else None
    if maker is None or key != "sqrt_at_zero":
        return []
    for source in maker.inputs:
        if source.behind(_SPREADS, 3) is not None:
            return ["std_at_zero"]
        summed = source.behind(_SUMS, 2)
        if summed is not None and summed.behind(_SQUARES, 2) is not None:
            return ["norm_at_zero"]
    return []


def _unselected(case: Case) -> bool:
    """Whether the gradient is 0 wherever 0 / 0 or 0 * inf made NaN: the forward did not select these elements."""
    gradient = case.tensor("self")
    if not case.result.flags.nan or not isinstance(gradient, Tensor):
        return False
    nan = case.out.isnan()
    try:
        return bool((gradient.expand_as(nan)[nan] == 0).all())
    except RuntimeError:
        return False
