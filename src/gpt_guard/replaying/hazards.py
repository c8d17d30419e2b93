"""Values at which an operation is finite, or is masked later, while its derivative is not: looked for in the forward.

When the derivative fails, the input of the forward may be gone, and reading it through the graph would unpack saved
tensors, which checkpointing allows only once. One comparison of a few kinds of operations finds them while at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gpt_guard.records import Operand
from gpt_guard.replaying.forwards import Hazard
from gpt_guard.replaying.values import count, dead_rows, many, measure
from gpt_guard.replaying.words import word_for

_Rule = Callable[[dict[str, Any]], tuple[str, Tensor, str, str] | None]


def hazard(base: str, bound: dict[str, Any]) -> Hazard | None:
    """The hazard among the inputs of an operation, or None. Reads the device for a few kinds of operations."""
    rule = _RULES.get(base)
    found = rule(bound) if rule is not None else None
    if found is None:
        return None
    name, tensor, fact, key = found
    operand = Operand(name=name, tensor=measure(tensor), facts=(fact,))
    return Hazard(operand, f"{word_for(base)} of {fact}" if name == "input" else f"{word_for(base)} with {fact}", key)


def _zeros(key: str, part: str = "self", name: str = "input") -> _Rule:
    def rule(bound: dict[str, Any]) -> tuple[str, Tensor, str, str] | None:
        tensor = bound.get(part)
        if not isinstance(tensor, Tensor):
            return None
        zeros = count(tensor.detach() == 0)
        said = many(zeros, "zero")
        return (name, tensor, said if name == "input" else f"{said} as {name}", key) if zeros else None

    return rule


def _power(bound: dict[str, Any]) -> tuple[str, Tensor, str, str] | None:
    exponent = bound.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent >= 1 or exponent == 0:
        return None
    found = _zeros("pow_at_zero")(bound)
    return (*found[:2], f"{found[2]} to the power of {exponent:g}", found[3]) if found is not None else None


def _edges(bound: dict[str, Any]) -> tuple[str, Tensor, str, str] | None:
    tensor = bound["self"]
    edges = count(tensor.detach().abs() == 1)
    return ("input", tensor, f"{many(edges, 'value')} at -1 or 1", "edge_of_domain") if edges else None


def _masked_rows(bound: dict[str, Any]) -> tuple[str, Tensor, str, str] | None:
    tensor, dims = bound["self"], bound.get("dim")
    dim = dims[0] if isinstance(dims, (list, tuple)) and dims else -1
    dead, _ = dead_rows(tensor, dim)
    fact = f"{many(dead, 'row')} that {'is' if dead == 1 else 'are'} -inf throughout"
    return ("input", tensor, fact, "logsumexp_masked") if dead else None


# Not norm, std, prod, cumprod and atan2: torch defines their derivatives at 0.
_RULES: dict[str, _Rule] = {
    "sqrt": _zeros("sqrt_at_zero"),
    "rsqrt": _zeros("sqrt_at_zero"),
    "pow": _power,
    "log": _zeros("log_at_zero"),
    "log2": _zeros("log_at_zero"),
    "log10": _zeros("log_at_zero"),
    "div": _zeros("division_at_zero", "other", "divisor"),
    "reciprocal": _zeros("division_at_zero"),
    "acos": _edges,
    "asin": _edges,
    "atanh": _edges,
    "acosh": _edges,
    "logsumexp": _masked_rows,
}
