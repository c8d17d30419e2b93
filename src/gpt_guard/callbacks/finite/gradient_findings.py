"""Which of several bad gradients was the first one that backward() made, and what FiniteGuard says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.callbacks.finite.forward_findings import GUARD, amount
from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.explain import no_half
from gpt_guard.hooks.autograd_graph.gradient_path import PathStep, names_of, operations_above, suspects
from gpt_guard.hooks.autograd_graph.nodes import uses
from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, TensorStats

_LISTED = 10
# They do not prove a cause: any softmax lies between, or code that nobody can look into.
_VAGUE = ("masked_row", "hook_or_manual")


def confirmed(watch: Watch, names: Sequence[str], norms: Sequence[float]) -> dict[str, TensorStats]:
    """The gradients that are bad, given their norms: exact, since squares of finite values may overflow."""
    bad: dict[str, TensorStats] = {}
    # A NaN or an infinity survives the sum; x - x is 0 for any other number.
    total = sum(norms)
    if total - total == 0.0:
        return bad
    for name, norm in zip(names, norms, strict=True):
        grad = watch.tracked[name].grad
        if norm - norm != 0.0 and grad is not None and (stats := describe(grad)) is not None:
            bad[name] = stats
    return bad


def bad_now(held: Mapping[str, Tensor]) -> dict[str, TensorStats]:
    """The gradients of these parameters that are bad as they are now, exactly; reads the device."""
    found = {name: describe(tensor.grad) for name, tensor in held.items() if tensor.grad is not None}
    return {name: stats for name, stats in found.items() if stats is not None}


class First(NamedTuple):
    """The first bad gradient in backward order; `module` is where the parameter was used, `exact` if known so."""

    parameter: str
    module: str
    exact: bool


def first_bad(watch: Watch, bad: Sequence[str], loss: Tensor | None) -> First:
    """Find it in the loss's autograd graph, or by the order in which modules returned where that is out of reach.

    A parameter that is used in several places (a tied embedding) has a bad gradient as soon as one of them has. So
    those used once decide; a shared one comes first only if no good gradient lies between it and them.
    """
    ranks = {} if loss is None else uses(loss)
    numbers = {name: ranks.get(id(watch.tracked[name]), []) for name in watch.tracked}
    if any(not numbers[name] for name in bad):
        return _last_returned(watch, bad)
    once = [name for name in bad if len(numbers[name]) == 1] or list(bad)
    first = max(once, key=lambda name: numbers[name][0])
    shared = max(bad, key=lambda name: numbers[name][0])
    place, later = numbers[first][0], numbers[shared][0]
    good = set(numbers) - set(bad)
    if later > place and not any(place < number < later for name in good for number in numbers[name]):
        return First(shared, _used_last(watch, shared), True)
    return First(first, watch.owner_of(first)[0], True)


def _used_last(watch: Watch, parameter: str) -> str:
    """Which of the modules that share a parameter returned last: backward comes to it first."""
    tensor = watch.tracked[parameter]
    named = watch.model.named_parameters(remove_duplicate=False)
    owners = {name.rpartition(".")[0] for name, other in named if other is tensor}
    for index in reversed(watch.tap.order):
        if watch.tap.names[index] in owners:
            return watch.tap.names[index]
    return watch.owner_of(parameter)[0]


def _last_returned(watch: Watch, bad: Sequence[str]) -> First:
    ranks = {watch.tap.names[index]: rank for rank, index in enumerate(watch.tap.order)}
    parents = {name.rpartition(".")[0] for name in watch.tap.names if name}

    def rank(name: str) -> tuple[bool, int]:
        owner = watch.owner_of(name)[0]
        # A module with children returns after them, wherever it used its own parameter: those come last.
        return owner not in parents, ranks.get(owner, -1)

    first = max(bad, key=rank)
    return First(first, watch.owner_of(first)[0], False)


def bad_gradient(
    watch: Watch,
    bad: Mapping[str, TensorStats | float],
    loss: Tensor | None,
    here: dict[str, Any],
) -> Finding:
    """Gradients are bad although the forward was clean.

    `bad` holds their statistics, or their norms where only those are known.
    """
    parameter, module, exact = first_bad(watch, list(bad), loss)
    known = bad[parameter]
    stats = known if isinstance(known, TensorStats) else None
    held = f"holds {amount(stats)}" if stats is not None else f"has the norm {known}"
    others = [name for name in bad if name != parameter]
    plural = "s are" if len(others) > 1 else " is"
    also = f" {len(others)} other gradient{plural} non-finite too." if others else " All other gradients are finite."
    place = f"`{module}`" if module else "the model itself"
    order = "First in backward order" if exact else "Last to return, so most likely first in backward order"
    tensor = watch.tracked[parameter]
    good = [other for name, other in watch.tracked.items() if name not in bad]
    steps = operations_above(loss, tensor, good) if loss is not None else []
    there = names_of(steps)
    named = f" Operations between it and the last finite gradient: {', '.join(there[:_LISTED])}." if there else ""
    evidence: dict[str, Any] = {"bad_gradients": [parameter, *others][:_LISTED], "bad_gradient_count": len(bad)}
    likely = list(_likely(tensor, steps, alone=not others))
    return finding(
        "GG104",
        f"The gradient of `{parameter}` {held}; loss and {_outputs(watch)} were finite.{also}{named}",
        likely=likely,
        unlikely=["half_overflow"] if no_half(watch, loss) else (),
        shown=likely[:1] if likely[0] not in _VAGUE else (),
        module=module,
        module_class=_class_of(watch, module),
        parameter=parameter,
        tensor=stats,
        origin=f"{order}: backward() made it in {place} or in the code just after it.",
        evidence=evidence | ({"operations": there[:_LISTED]} if there else {}),
        moment=Moment.AFTER_BACKWARD,
        guard=GUARD,
        **here,
    )


def _likely(parameter: Tensor, steps: list[PathStep], *, alone: bool) -> Iterator[str]:
    if parameter.dtype is torch.float16:
        yield "half_overflow"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        yield "hook_or_manual"
    found = list(suspects(steps))
    yield from found
    # What spoils the gradient of one parameter alone is seldom the way that leads to it.
    yield from ("hook_or_manual", "steep") if alone and not found else ("steep",)


def changed_before_step(
    watch: Watch, bad: Mapping[str, TensorStats], here: dict[str, Any], *, scaled: bool, seen: bool = True
) -> Finding:
    """Gradients that were finite after backward() are not when the optimizer is about to apply them.

    `scaled` tells that a GradScaler's scale is on them, so that they were not looked at after backward(); `seen`
    that the loop has called backward() at all.
    """
    first, *others = bad
    module, kind = watch.owner_of(first)
    plural = "s are" if len(others) > 1 else " is"
    also = f" {len(others)} other gradient{plural} non-finite too." if others else " All other gradients are finite."
    unscaled = (
        f"It was finite after backward(), and so were loss and {_outputs(watch)}."
        if seen
        else "The loop has not called backward(): the gradient was put there by hand, as torch.autograd.grad gives it."
    )
    when = (
        "A GradScaler has scaled the loss, and step() was called without it: it would have skipped this step."
        if scaled
        else unscaled
    )
    maker = "backward()" if scaled else "Code between backward() and step()" if seen else "Code before step()"
    return finding(
        "GG104",
        f"The gradient of `{first}` holds {amount(bad[first])} at the step. {when}{also}",
        likely=["steep"],
        shown=["half_overflow"] if scaled else ["hook_or_manual"] if seen else (),
        module=module,
        module_class=kind,
        parameter=first,
        tensor=bad[first],
        origin=f"{maker} made it.",
        evidence={"bad_gradients": [first, *others][:_LISTED], "bad_gradient_count": len(bad)},
        guard=GUARD,
        **here,
    )


def _outputs(watch: Watch) -> str:
    return "module outputs" if watch.tap.insides_watched or not watch.tap.watching else "the model's output"


def _class_of(watch: Watch, module: str) -> str | None:
    try:
        return type(watch.model.get_submodule(module)).__name__
    except AttributeError:
        return None
