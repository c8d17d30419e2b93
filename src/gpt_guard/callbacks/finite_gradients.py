"""Which of several bad gradients was the first one that backward() made, and what FiniteGuard says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpt_guard.callbacks.finite_words import GUARD, amount
from gpt_guard.catalogue import finding
from gpt_guard.hooks.reach import uses
from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, TensorStats

_LISTED = 10


def confirmed(watch: Watch, names: Sequence[str], norms: Sequence[float]) -> dict[str, TensorStats]:
    """The gradients that are bad, given their norms: exact, since squares of finite values may overflow."""
    bad: dict[str, TensorStats] = {}
    if all(norm - norm == 0.0 for norm in norms):
        return bad
    for name, norm in zip(names, norms, strict=True):
        grad = watch.tracked[name].grad
        if norm - norm != 0.0 and grad is not None and (stats := describe(grad)) is not None:
            bad[name] = stats
    return bad


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
    dtype = str(watch.tracked[parameter].dtype).removeprefix("torch.")
    place = f"`{module}`" if module else "the model itself"
    order = "First in backward order" if exact else "Last to return, so most likely first in backward order"
    return finding(
        "GG104",
        f"The gradient of `{parameter}` {held}; loss and module outputs were finite.{also}",
        likely=["half_overflow"] if dtype == "float16" else [] if others else ["hook_or_manual"],
        module=module,
        module_class=_class_of(watch, module),
        parameter=parameter,
        tensor=stats,
        origin=f"{order}: backward() made it in {place} or in the code just after it.",
        evidence={"bad_gradients": [parameter, *others][:_LISTED], "bad_gradient_count": len(bad)},
        moment=Moment.AFTER_BACKWARD,
        guard=GUARD,
        **here,
    )


def _class_of(watch: Watch, module: str) -> str | None:
    try:
        return type(watch.model.get_submodule(module)).__name__
    except AttributeError:
        return None
