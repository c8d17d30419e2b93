"""From an operation that made non-finite values to what is said about it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt_guard.catalogue.operation_causes import likely
from gpt_guard.records import Operand, OperationSeen
from gpt_guard.replaying import rules_arithmetic, rules_layers, rules_math
from gpt_guard.replaying.case import Case, Evidence
from gpt_guard.replaying.rules_arithmetic import Rule
from gpt_guard.replaying.rules_backward import backward, name_of
from gpt_guard.replaying.schema import EMPTY, FILLS
from gpt_guard.replaying.values import count, many, measure
from gpt_guard.replaying.words import word_for

_MOST_OPERANDS = 6
_RULES = {**rules_arithmetic.RULES, **rules_math.RULES, **rules_layers.RULES}
_PARTS = {
    "self": "input",
    "mat1": "left",
    "mat2": "right",
    "attn_mask": "mask",
    "attn_bias": "mask",
    "src": "input",
}


def answer(case: Case) -> OperationSeen:
    """The operation in words, with its place, its inputs, the evidence and the causes that fit, likeliest first."""
    found = _evidence(case)
    name = word_for(case.op.base) if case.node is None else name_of(case)
    name = "logdet" if case.of_determinant else name
    return OperationSeen(
        name=name,
        aten=case.op.aten if case.node is None else f"{case.op.aten} in {case.node}",
        phase=case.phase,
        module=case.place.module,
        module_class=case.place.module_class,
        where=case.place.line,
        operands=tuple(_operands(case, found)),
        output=measure(case.result.tensor),
        shows=found.shows,
        causes=likely(found.causes),
    )


def _evidence(case: Case) -> Evidence:
    if case.node is not None and (found := _asked(backward, case)) is not None:
        return found
    if case.op.base in EMPTY:
        return Evidence("memory that was never written was read", ("uninitialised",))
    if case.of_determinant:
        return Evidence("the logarithm of a determinant that is negative", ("log_of_negative",))
    if case.op.base in FILLS and (found := _fill(case)) is not None:
        return found
    rules = _RULES.get(case.op.base, ())
    if case.op.base.startswith("_scaled_dot_product"):
        rules = (rules_layers.attention,)
    for rule in (*rules, *(rule for rule in rules_layers.LATE if rule not in rules)):
        if (found := _asked(rule, case)) is not None:
            return found
    return Evidence(f"{word_for(case.op.base)} of finite values", ("own_formula",))


def _asked(rule: Rule, case: Case) -> Evidence | None:
    """What a rule finds; nothing where it was not written for this kind of tensor: the place is the same without it."""
    try:
        return rule(case)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


def _fill(case: Case) -> Evidence | None:
    if case.node is not None:
        return None
    bad = count(~torch.isfinite(case.out))
    kind = "NaN" if case.result.flags.nan else "an infinity"
    key = "filled" if case.result.flags.nan else "mask_used"
    return Evidence(f"{word_for(case.op.base)} wrote {kind} on purpose, {many(bad, 'time')}", (key,))


def _operands(case: Case, found: Evidence) -> list[Operand]:
    hazard = case.forward.hazard if case.node is not None and case.forward is not None else None
    listed = [hazard.operand] if hazard is not None else []
    for name, value in case.bound.items():
        shown = name if case.node is None else f"{name} of {case.op.base}"
        part = _part(case, name) if case.node is None else shown
        if isinstance(value, Tensor):
            listed.append(Operand(name=part, tensor=measure(value), facts=found.facts.get(name, ())))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, Tensor) for each in value):
            listed += [Operand(name=f"{part}[{i}]", tensor=measure(each)) for i, each in enumerate(value)]
        elif isinstance(value, float) or (isinstance(value, int) and name in ("other", "exponent", "value")):
            listed.append(Operand(name=part, value=float(value)))
    return listed[:_MOST_OPERANDS]


def _part(case: Case, name: str) -> str:
    if name == "other" and case.op.base in ("div", "fmod", "remainder"):
        return "divisor"
    return _PARTS.get(name, name)


def deliberate(case: Case) -> tuple[bool, str | None]:
    """Whether non-finite values were made on purpose, as a mask is, and the key of the cause if they go wrong."""
    flags = case.result.flags
    if case.node is not None or case.op.base in EMPTY or case.of_determinant:
        return False, None
    if case.op.base in FILLS:
        return True, "filled" if flags.nan else None
    if flags.nan:
        return False, None
    if any(isinstance(value, float) and not math.isfinite(value) for value in case.bound.values()):
        return True, None
    if case.position > 0:
        # Statistics beside the result, such as the logsumexp of an attention row without a key.
        return True, None
    if flags.only_neg_inf:
        if case.op.base == "add" and rules_arithmetic.adds_least(case):
            return True, "two_masks_added"
        if case.op.base in ("mul", "_to_copy") and _is_mask(case.out):
            return True, "mask_beyond_dtype"
        if case.op.base == "log" and _is_indicator(case):
            return True, None
    return False, None


def _is_mask(values: Tensor) -> bool:
    """Whether all that is finite has one value, as in a mask of 0 and -inf, or of -inf only."""
    finite = values[torch.isfinite(values)]
    return not finite.numel() or bool((finite == finite.flatten()[0]).all())


def _is_indicator(case: Case) -> bool:
    """Whether the input holds only 0 and 1, both of them, and is no probability that was rounded."""
    values = case.tensor("self")
    if values is None or case.behind("self", rules_math.PROBABILITIES) is not None:
        return False
    ones = values == 1
    return bool(((values == 0) | ones).all()) and bool(ones.any())
