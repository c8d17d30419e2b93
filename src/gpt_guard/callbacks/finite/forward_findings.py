"""What FiniteGuard says of a bad tensor in a forward: who made it, what the evidence is, which causes it points to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gpt_guard.callbacks.finite.first_seen import FirstSeen, Shown
from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.explain import Operation
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, TensorStats

GUARD = "FiniteGuard"


def module_name(watch: Watch, index: int) -> str:
    """A module's path and class as a person reads it."""
    name, kind = watch.tap.names[index], type(watch.tap.modules[index]).__name__
    return f"`{name}` ({kind})" if name else f"the model itself ({kind})"


def module_fields(watch: Watch, index: int) -> dict[str, Any]:
    """The fields of a finding that name a module."""
    return {"module": watch.tap.names[index], "module_class": type(watch.tap.modules[index]).__name__}


def amount(stats: TensorStats) -> str:
    """Counts of the non-finite elements in words."""
    parts = ((stats.nan, "NaN"), (stats.pos_inf, "+inf"), (stats.neg_inf, "-inf"))
    counts = " and ".join(f"{count} {kind}" for count, kind in parts if count)
    return f"{counts} of {stats.numel} element{'s' if stats.numel != 1 else ''}"


def state_of(shown: Shown) -> str:
    """What is wrong with a tensor: its counts where it was read, its extremes where only those are known."""
    if shown.stats is not None:
        return f"holds {amount(shown.stats)}"
    shape = ", ".join(map(str, shown.shape))
    return f"is non-finite (shape [{shape}], {shown.dtype}, minimum {shown.low:g}, maximum {shown.high:g})"


def shown_fields(shown: Shown) -> dict[str, Any]:
    """Evidence of a tensor that was not read itself; counts that nobody made are not told."""
    if shown.stats is not None:
        return {}
    return {"shape": list(shown.shape), "dtype": shown.dtype, "minimum": shown.low, "maximum": shown.high}


def bad_output(
    watch: Watch,
    culprit: FirstSeen,
    here: dict[str, Any],
    *,
    operation: Operation | None,
    diverging: bool,
    half: bool = True,
) -> Finding:
    """A module made it, or its code between two of its children did.

    `operation` is what the autograd graph proves about it; `diverging` tells that the loss had run away before, `half`
    that float16 may have a part in it.
    """
    assert culprit.maker is not None
    shown, receiver = culprit.shown, culprit.receiver
    if receiver is None:
        seen, position = f"The output of {module_name(watch, culprit.maker)}", f"output{shown.position}"
    else:
        seen = f"Input {shown.position} of {module_name(watch, receiver)}"
        position = f"input{shown.position} of {watch.tap.names[receiver] or 'the model'}"
    return finding(
        "GG101",
        f"{seen} {state_of(shown)}.{_infinities(watch, culprit)}{graph_shows(operation)}",
        shown=causes_shown(watch, culprit, operation, diverging=diverging),
        likely=causes_likely(watch, culprit),
        unlikely=() if half else OF_HALF,
        **module_fields(watch, culprit.maker),
        position=position,
        origin=_origin(watch, culprit),
        tensor=shown.stats,
        evidence=_evidence(watch, culprit) | ({"operation": operation.name} if operation else {}),
        guard=GUARD,
        **here,
    )


def graph_shows(operation: Operation | None) -> str:
    """What the graph shows, as a sentence."""
    return f" The graph shows: {operation.shows}." if operation else ""


def bad_from_outside(watch: Watch, culprit: FirstSeen, here: dict[str, Any]) -> Finding:
    """It was bad before any code of the model ran: the batch, or code of the loop between two calls of modules."""
    assert culprit.receiver is not None
    shown, receiver = culprit.shown, culprit.receiver
    common = {"tensor": shown.stats, "evidence": shown_fields(shown), "guard": GUARD, **here}
    if culprit.after is not None:
        return finding(
            "GG101",
            f"Input {shown.position} of {module_name(watch, receiver)} {state_of(shown)}.",
            position=f"input{shown.position} of {watch.tap.names[receiver]}",
            origin=f"The code that called {module_name(watch, receiver)} made it, after "
            f"{module_name(watch, culprit.after)} had returned a finite output; no module of the model was running.",
            cause_id=f"before {watch.tap.names[receiver]}",
            **common,
        )
    whose = "the model" if receiver == 0 else module_name(watch, receiver)
    return finding(
        "GG103",
        f"Input {shown.position} of {whose} {state_of(shown)}.",
        position=f"input{shown.position}",
        **module_fields(watch, receiver if receiver == 0 else 0),
        origin="The batch was non-finite before the model was called; no module made it.",
        **common,
    )


def _origin(watch: Watch, culprit: FirstSeen) -> str:
    assert culprit.maker is not None
    maker = module_name(watch, culprit.maker)
    after = f"after {module_name(watch, culprit.after)} had returned" if culprit.after is not None else ""
    if culprit.ignored:
        return f"{maker} returned it. Its outputs are ignored as asked: whether it made it or was given it is unknown."
    if culprit.receiver is not None:
        before = f"before it called {module_name(watch, culprit.receiver)}, which only received it"
        sure = "" if culprit.certain else " This is the closest that can be told: a method was called, not the module."
        return f"{maker} made it in its own code, {f'{after} and ' if after else ''}{before}.{sure}"
    if not culprit.certain:
        return f"{maker} made it, or was given it: it writes to its own input, so what came in is no longer known."
    if culprit.after is not None:
        return f"{maker} made it in its own code, {after} a finite output."
    if culprit.neg_inf is not None:
        return f"{maker} made it, of an input that holds -inf; its parameters are finite."
    return f"{maker} made it: its inputs and its parameters are finite."


def _infinities(watch: Watch, culprit: FirstSeen) -> str:
    if not culprit.masked_rows or used_neg_inf(watch, culprit):
        return _given_neg_inf(culprit)
    rows = "1 row is" if culprit.masked_rows == 1 else f"{culprit.masked_rows} rows are"
    return f" In what it works on, {rows} -inf throughout: softmax makes of that 0/0."


def _given_neg_inf(culprit: FirstSeen) -> str:
    if culprit.neg_inf is None:
        return ""
    return f" Its input {culprit.neg_inf} holds -inf: fine for a mask, but as a number it makes infinities and NaN."


def _evidence(watch: Watch, culprit: FirstSeen) -> dict[str, Any]:
    found = shown_fields(culprit.shown)
    if culprit.receiver is not None:
        found["received_by"] = watch.tap.names[culprit.receiver]
    if culprit.after is not None:
        found["after"] = watch.tap.names[culprit.after]
    if culprit.neg_inf is not None:
        found["neg_inf_input"] = culprit.neg_inf
    if culprit.masked_rows:
        found["rows_all_neg_inf"] = culprit.masked_rows
    if culprit.bad_locals:
        found["bad_variables"] = list(culprit.bad_locals)
    return found


def mask_seen(watch: Watch, index: int, shown: Shown, here: dict[str, Any]) -> Finding:
    """An output with -inf as a mask has it; only recorded."""
    return finding(
        "GG109",
        f"The output of {module_name(watch, index)} {_mask_state(shown)}, and neither NaN nor +inf.",
        **module_fields(watch, index),
        position=f"output{shown.position}",
        tensor=shown.stats,
        evidence=shown_fields(shown),
        guard=GUARD,
        **here,
    )


def _mask_state(shown: Shown) -> str:
    return "holds -inf" if shown.stats is None else f"holds {amount(shown.stats)}"


def scaler_stuck(watch: Watch, skipped: int) -> Finding:
    """The GradScaler finds no scale at which the gradients are finite."""
    return finding(
        "GG110",
        f"GradScaler has skipped {skipped} steps in a row: no parameter has moved since.",
        step=watch.step,
        moment=Moment.BEFORE_STEP,
        guard=GUARD,
    )


OF_HALF = ("overflow_half", "eps_lost")
"""They need float16 somewhere."""
_HALF_MAX = torch.finfo(torch.float16).max
# Within an order of magnitude of the limit, the next product or sum goes over it.
_NEAR = 0.1


def causes_shown(watch: Watch, culprit: FirstSeen, operation: Operation | None, *, diverging: bool) -> Iterable[str]:
    """The causes that the evidence points to, each with a test and a fix of its own."""
    if diverging:
        yield "lr_too_high"
    if operation is not None:
        yield {"log_of_zero": "log_or_div_zero"}.get(operation.cause, operation.cause)
    if used_neg_inf(watch, culprit):
        yield "neg_inf_input"
    elif culprit.masked_rows:
        yield "all_masked_row"


def causes_likely(watch: Watch, culprit: FirstSeen) -> Iterable[str]:
    """The causes that fit module, dtype and values, the likeliest first."""
    assert culprit.maker is not None
    module, shown = watch.tap.modules[culprit.maker], culprit.shown
    nan, infinite = _kinds(shown)
    if culprit.masked_rows:
        yield "all_masked_row"
    if shown.dtype == "float16" and (infinite or _near_half_limit(shown)):
        yield "overflow_half"
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        yield "zero_std"
    own_code = culprit.receiver is not None or culprit.after is not None
    if own_code and nan and "att" in (watch.tap.names[culprit.maker] + type(module).__name__).lower():
        yield "all_masked_row"
    if culprit.neg_inf is not None:
        yield "neg_inf_input"
    if infinite and shown.dtype != "float16":
        yield "exp_overflow"
    if (own_code and nan) or shown.dtype not in ("float16", "bfloat16"):
        # Whatever else it is, a float32 output has not left the range of float16.
        yield "log_or_div_zero"
        yield "negative_root"


def used_neg_inf(watch: Watch, culprit: FirstSeen) -> bool:
    """Whether -inf went into a module that has no use for it."""
    return (
        culprit.neg_inf is not None and culprit.maker is not None and _takes_no_mask(watch.tap.modules[culprit.maker])
    )


def _takes_no_mask(module: nn.Module) -> bool:
    """A single layer of torch's: it has no use for -inf."""
    softmax = isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.MultiheadAttention))
    plain = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return plain and not softmax


def _kinds(shown: Shown) -> tuple[bool, bool]:
    """Whether NaN and whether +inf is in it; extremes that are NaN hide infinities."""
    if shown.stats is not None:
        return shown.stats.nan > 0, shown.stats.pos_inf > 0
    nan = shown.low != shown.low
    return nan, not nan and shown.high == float("inf")


def _near_half_limit(shown: Shown) -> bool:
    if shown.stats is None:
        return True
    top = max(abs(shown.stats.finite_min or 0.0), abs(shown.stats.finite_max or 0.0))
    return top > _NEAR * _HALF_MAX
