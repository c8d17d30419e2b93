"""Dropout that is active although its module is in eval mode: which call, on which line, and whether it is meant."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from gpt_guard.catalogue import finding
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.unregistered import find_hidden, modules_in, plain_attributes
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity, SourceLine
from gpt_guard.records.render import number

DROPOUT_CALLS = ("dropout", "attention", "multi_head_attention")
"""The kinds of function calls that may drop something."""
# Written out like this, dropout that is always on is meant more often than not.
_WRITTEN_OUT = re.compile(r"\b(training|train)\s*=\s*True\b")


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
    on_purpose = path is not None and found.where is not None and _WRITTEN_OUT.search(found.where.text) is not None
    likely = ["unregistered"] if path is None else ["on_purpose", "literal"] if on_purpose else ["default"]
    if found.name == "scaled_dot_product_attention":
        likely = ["attention"] if path is not None else ["unregistered", "attention"]
    attribute, kept = _kept(watch, module) if path is None else (None, "")
    place = f"`{path}`" if path else "the model's own forward"
    where = place if path is not None else f"a module ({type(module).__name__}) that eval() misses"
    measured = "" if apart is None else f" Two eval passes of one batch differ by {number(apart)}."
    line = f"{found.where.file}:{found.where.line}" if found.where is not None else found.name
    return finding(
        "GG505",
        f"{found.name}(p={found.p:g}) in {where} drops values in eval mode.{kept}{measured}",
        shown=likely,
        severity=Severity.INFO if on_purpose else Severity.WARNING,
        step=watch.step,
        moment=Moment.FORWARD,
        evaluation=True,
        module=path,
        module_class=type(module).__name__,
        where=found.where,
        # All that one attribute hides is one cause, on whatever lines it is called.
        cause_id=line if attribute is None else f"in {attribute}",
        evidence={"p": found.p}
        | ({} if apart is None else {"difference": apart})
        | ({} if attribute is None else {"attribute": attribute}),
    )


def _kept(watch: Watch, module: nn.Module) -> tuple[str | None, str]:
    """The attribute of a registered module that holds this one past torch, and a sentence about what is in there.

    None and no sentence where nobody in the model holds it.
    """
    for attribute, value, owner, _ in plain_attributes(watch.model):
        inside = list(modules_in(value))
        if any(each is module for each in inside):
            return attribute, _described(watch, attribute, type(owner).__name__, value, inside)
    return None, ""


def _described(watch: Watch, attribute: str, owner: str, value: Any, inside: list[nn.Module]) -> str:
    registered = {id(tensor) for tensor in watch.model.parameters()}
    held = {id(tensor): tensor for each in inside for tensor in each.parameters(recurse=False)}
    trainable = [tensor for key, tensor in held.items() if tensor.requires_grad and key not in registered]
    hidden = next((each for each in find_hidden(watch.model, trainable) if each.name == attribute), None)
    kind = f"a {type(value).__name__}" if hidden is None else hidden.kind
    text = f" It is in attribute `{attribute}` ({kind}) of {owner}, which does not register it."
    groups = [group for optimizer in watch.optimizers for group in optimizer.param_groups]
    stepped = {id(tensor) for group in groups for tensor in group["params"]}
    untrained = sum(id(tensor) not in stepped for tensor in trainable)
    if not untrained:
        return text
    tensors = f"{untrained} trainable tensor{'s' if untrained > 1 else ''}"
    return f"{text} No optimizer holds the {tensors} in there (GG303): the likely cause of both is the plain attribute."
