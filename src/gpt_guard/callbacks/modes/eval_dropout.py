"""Dropout that is active although its module is in eval mode: which call, on which line, and whether it is meant."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

from gpt_guard.callbacks.modes.eval_missed import Missed, find_missed
from gpt_guard.catalogue import finding
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity, SourceLine
from gpt_guard.records.render import number

# Written out like this, dropout that is always on is meant more often than not.
_SAID = re.compile(r"\b(training|train)\s*=\s*True\b")


class DropoutCall(NamedTuple):
    """A call that drops something: its function, the innermost module around it, its line and its probability."""

    name: str
    module: nn.Module | None
    where: SourceLine | None
    p: float


def active_dropout(call: FunctionCall) -> DropoutCall | None:
    """The call if it drops anything; None for one that is switched off."""
    if call.kind == "dropout":
        training = call.get("training", call.get("train", call.name != "alpha_dropout"))
        p = call.get("p", 0.5)
    elif call.kind == "attention":
        training, p = True, call.get("dropout_p", 0.0)
    else:
        training, p = call.get("training", True), call.get("dropout_p", 0.0)
    if not training or not isinstance(p, (int, float)) or not p > 0:
        return None
    return DropoutCall(call.name, call.module, call.line, float(p))


def dropout_in_eval(watch: Watch, found: DropoutCall, *, apart: float | None = None) -> Finding | None:
    """GG505 for dropout in a module that is in eval mode, or that `eval()` never reaches; None where it is meant.

    `apart` is how far two eval passes of one batch were apart, where that was measured.
    """
    module = found.module
    if module is None:
        return None
    paths = {id(each): path for path, each in watch.model.named_modules()}
    path = paths.get(id(module))
    if path is not None and (module.training or watch.mode_is_meant(path)):
        # In training mode on purpose or by mistake: EvalModeAssert judges modes.
        return None
    on_purpose = path is not None and found.where is not None and _SAID.search(found.where.text) is not None
    likely = ["unregistered"] if path is None else ["on_purpose", "literal"] if on_purpose else ["default"]
    if found.name == "scaled_dot_product_attention":
        likely = ["attention"] if path is not None else ["unregistered", "attention"]
    missed = find_missed(watch, module) if path is None else None
    place = f"`{path}`" if path else "the model's own forward"
    where = place if path is not None else f"a module ({type(module).__name__}) that eval() misses"
    measured = "" if apart is None else f" Two eval passes of one batch differ by {number(apart)}."
    line = f"{found.where.file}:{found.where.line}" if found.where is not None else found.name
    return finding(
        "GG505",
        f"{found.name}(p={found.p:g}) in {where} drops values in eval mode.{_kept(missed)}{measured}",
        shown=likely,
        severity=Severity.INFO if on_purpose else Severity.WARNING,
        step=watch.step,
        moment=Moment.FORWARD,
        evaluation=True,
        module=path,
        module_class=type(module).__name__,
        where=found.where,
        # All that one attribute hides is one cause, on whatever lines it is called.
        cause_id=line if missed is None else f"in {missed.name}",
        evidence={"p": found.p}
        | ({} if apart is None else {"difference": apart})
        | ({} if missed is None else {"attribute": missed.name}),
    )


def _kept(missed: Missed | None) -> str:
    """Where the module is kept, and what eval() is not alone in missing there."""
    if missed is None:
        return ""
    said = f" It is in attribute `{missed.name}` ({missed.kind}) of {missed.owner}, which does not register it."
    if not missed.untrained:
        return said
    tensors = f"{missed.untrained} trainable tensor{'s' if missed.untrained > 1 else ''}"
    return f"{said} No optimizer holds the {tensors} in there (GG303): the likely cause of both is the plain attribute."
