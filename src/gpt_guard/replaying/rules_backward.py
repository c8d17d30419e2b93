"""Why a derivative failed while the forward was finite: read from what the forward was given, and from the gradient.

When the derivative fails, the input of the forward may be gone, and reading it through the graph would unpack saved
tensors, which checkpointing allows only once. So values at which a derivative is not finite are looked for in the
forward already: one comparison of a few kinds of operations finds them while at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gpt_guard.records import Operand
from gpt_guard.replaying.failed_operation import Evidence, FailedOperation
from gpt_guard.replaying.operations import names, word_for, word_for_node
from gpt_guard.replaying.places import Hazard
from gpt_guard.replaying.rules_elementwise import overflow
from gpt_guard.replaying.values import be, count, dead_rows, figure, many, measure

WHERE_UNSELECTED = "where_unselected"
DEFINED_AT_ZERO = ("std", "norm")
_SUMS, _SQUARES = names("sum mean"), names("pow mul square")
_SPREADS = names("var std var_mean")
_DECOMPOSITIONS = ("LinalgEigh", "LinalgSvd", "LinalgQr", "LinalgEig", "LinalgInv", "LinalgSolve", "LinalgCholesky")


def name_of(case: FailedOperation) -> str:
    """The word for the forward operation that a derivative belongs to."""
    if case.forward is not None:
        return word_for(case.forward.base)
    return word_for_node(case.node or "")


def backward(case: FailedOperation) -> Evidence | None:
    """What the hazard seen in the forward explains; None if there was none and the result does not overflow either."""
    name = name_of(case)
    if name == "pow" and case.op.base == "log" and bool(((base := case.tensor("self")) < 0).any()):
        negative = many(count(base < 0), "negative number")
        shows = f"the derivative of pow by its exponent is a logarithm, here of {negative}"
        return Evidence(shows, ("pow_of_negative", "log_of_negative"))
    # A zero elsewhere in the input explains no result that only the dtype is too small for.
    over, reached = overflow(case), case.exceeds()
    if over is not None and reached is not None:
        shows = f"a gradient of {name} reached {figure(reached)}, {case.beyond}"
        return Evidence(shows, ("gradient_overflow", *over.causes))
    divisor = case.optional("other") if name in DEFINED_AT_ZERO and case.op.base == "div" else None
    if divisor is not None and bool((divisor != 0).any()):
        # torch leaves zeros out of these by itself.
        least = float(divisor[divisor != 0].abs().min())
        shows = f"the derivative of {name} divides by values as small as {figure(least)}"
        return Evidence(shows, ("gradient_overflow", "tiny_divisor"))
    found = case.forward.hazard if case.forward is not None else None
    if found is not None:
        causes = (*_refined(case, found.key), found.key)
        shows = f"the derivative of {found.shows}"
        if _unselected(case):
            return Evidence(f"{shows}: the gradient that arrives there is 0", (WHERE_UNSELECTED, *causes))
        return Evidence(shows, (*causes, WHERE_UNSELECTED))
    if any(kind in (case.node or "") for kind in _DECOMPOSITIONS):
        return Evidence(f"the derivative of {name}", ("decomposition", "singular_matrix"))
    return over


def _refined(case: FailedOperation, key: str) -> list[str]:
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


def _unselected(case: FailedOperation) -> bool:
    """Whether the gradient is 0 wherever 0 / 0 or 0 * inf made NaN: the forward did not select these elements."""
    gradient = case.optional("self")
    if not case.result.flags.nan or gradient is None:
        return False
    nan = case.out.isnan()
    try:
        return bool((gradient.expand_as(nan)[nan] == 0).all())
    except RuntimeError:
        return False


# The name of an operand, itself, what is wrong with it, and the key of the cause.
_Found = tuple[str, Tensor, str, str]
_Search = Callable[[dict[str, Any]], _Found | None]


def hazard(base: str, bound: dict[str, Any]) -> Hazard | None:
    """The hazard among the inputs of an operation, or None. Reads the device for a few kinds of operations."""
    search = _HAZARDS.get(base)
    found = search(bound) if search is not None else None
    if found is None:
        return None
    name, tensor, fact, key = found
    operand = Operand(name=name, tensor=measure(tensor), facts=(fact,))
    return Hazard(operand, f"{word_for(base)} of {fact}" if name == "input" else f"{word_for(base)} with {fact}", key)


def _zeros(key: str, part: str = "self", name: str = "input") -> _Search:
    def search(bound: dict[str, Any]) -> _Found | None:
        tensor = bound.get(part)
        if not isinstance(tensor, Tensor):
            return None
        zeros = count(tensor.detach() == 0)
        fact = many(zeros, "zero") + ("" if name == "input" else f" as {name}")
        return (name, tensor, fact, key) if zeros else None

    return search


def _power(bound: dict[str, Any]) -> _Found | None:
    exponent = bound.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent >= 1 or exponent == 0:
        return None
    found = _zeros("pow_at_zero")(bound)
    return (*found[:2], f"{found[2]} to the power of {exponent:g}", found[3]) if found is not None else None


def _edges(bound: dict[str, Any]) -> _Found | None:
    tensor = bound["self"]
    edges = count(tensor.detach().abs() == 1)
    return ("input", tensor, f"{many(edges, 'value')} at -1 or 1", "edge_of_domain") if edges else None


def _masked_rows(bound: dict[str, Any]) -> _Found | None:
    tensor, dims = bound["self"], bound.get("dim")
    dim = dims[0] if isinstance(dims, (list, tuple)) and dims else -1
    dead, _ = dead_rows(tensor, dim)
    fact = f"{many(dead, 'row')} that {be(dead)} -inf throughout"
    return ("input", tensor, fact, "logsumexp_masked") if dead else None


# Not norm, std, prod, cumprod and atan2: torch defines their derivatives at 0.
_HAZARDS: dict[str, _Search] = {
    **dict.fromkeys(("sqrt", "rsqrt"), _zeros("sqrt_at_zero")),
    "pow": _power,
    **dict.fromkeys(("log", "log2", "log10"), _zeros("log_at_zero")),
    "div": _zeros("division_at_zero", "other", "divisor"),
    "reciprocal": _zeros("division_at_zero"),
    **dict.fromkeys(("acos", "asin", "atanh", "acosh"), _edges),
    "logsumexp": _masked_rows,
}
