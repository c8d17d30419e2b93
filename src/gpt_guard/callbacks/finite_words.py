"""What FiniteGuard says: findings with their evidence, and the causes in the order that the evidence suggests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.blame import Blame, bad_state
from gpt_guard.catalogue import finding
from gpt_guard.hooks.forward import Place
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, TensorStats

_HALF_MAX = {"float16": torch.finfo(torch.float16).max}


def module_name(watch: Watch, index: int | None) -> str:
    """A module's path and class as a person reads it."""
    if index is None:
        return "the batch"
    name, kind = watch.tap.names[index], type(watch.tap.modules[index]).__name__
    return f"`{name}` ({kind})" if name else f"the model itself ({kind})"


def amount(stats: TensorStats) -> str:
    """Counts of the non-finite elements in words."""
    parts = ((stats.nan, "NaN"), (stats.pos_inf, "+inf"), (stats.neg_inf, "-inf"))
    counts = " and ".join(f"{count} {kind}" for count, kind in parts if count)
    return f"{counts} of {stats.numel} elements"


def _here(watch: Watch, moment: Moment, **more: Any) -> dict[str, Any]:
    return {
        "step": watch.step,
        "micro_batch": watch.micro_batch,
        "moment": moment,
        "evaluation": watch.evaluation and moment is Moment.FORWARD,
        "where": user_line(),
        "guard": "FiniteGuard",
        **more,
    }


def bad_batch(watch: Watch, position: str, stats: TensorStats) -> Finding:
    """The batch was bad before the model saw it."""
    return finding(
        "GG103",
        f"Input {position} of the model holds {amount(stats)}.",
        position=f"input{position}",
        module="",
        module_class=type(watch.model).__name__,
        origin="The batch was non-finite before the model was called; no module made it.",
        tensor=stats,
        **_here(watch, Moment.FORWARD),
    )


def bad_parameter(watch: Watch, name: str, stats: TensorStats, moment: Moment, **more: Any) -> Finding:
    """A parameter or buffer was bad before anything used it in this forward."""
    module, kind = watch.owner_of(name)
    is_parameter = name in watch.parameters
    if moment is Moment.START:
        when, likely = "It was so when the Guardian was entered.", ["loaded_so"]
    else:
        when = f"It was finite after the last watched step before step {watch.step}, so it was changed in between."
        likely = ["changed_outside_step"] if is_parameter else []
    return finding(
        "GG105" if is_parameter else "GG107",
        f"{'Parameter' if is_parameter else 'Buffer'} `{name}` holds {amount(stats)}. {when}",
        likely=likely,
        module=module,
        module_class=kind,
        parameter=name,
        tensor=stats,
        **{**_here(watch, moment), **more},
    )


def bad_output(watch: Watch, culprit: Blame, index: int, position: str, stats: TensorStats) -> Finding:
    """A module's output is bad, tested right where it was made."""
    receiver = culprit.receiver
    if culprit.state is not None:
        name, state = culprit.state
        user = module_name(watch, index)
        return bad_parameter(watch, name, state, Moment.FORWARD, origin=f"{user} was the first to use it.")
    if culprit.index is None:
        assert culprit.input_stats is not None and receiver is not None
        return bad_batch(watch, culprit.input_position or "", culprit.input_stats)
    if culprit.index == 0 and receiver is None and stats.shape == () and culprit.after is not None:
        return bad_loss(watch, None, stats, origin=_origin(watch, culprit), where=user_line())
    seen = f"The output of {module_name(watch, index)} holds {amount(stats)}."
    shown = stats
    if receiver is not None and culprit.input_stats is not None:
        shown = culprit.input_stats
        seen = f"Input {culprit.input_position} of {module_name(watch, receiver)} holds {amount(shown)}."
    here = _here(watch, Moment.FORWARD)
    return finding(
        "GG101",
        seen,
        likely=_likely_output(watch, culprit, shown),
        module=watch.tap.names[culprit.index],
        module_class=type(watch.tap.modules[culprit.index]).__name__,
        position=f"output{position}" if receiver is None else f"input{culprit.input_position} of the receiver",
        origin=_origin(watch, culprit),
        tensor=shown,
        evidence=_evidence(watch, culprit),
        **here,
    )


def _origin(watch: Watch, culprit: Blame) -> str:
    maker = module_name(watch, culprit.index)
    if culprit.receiver is not None:
        before = f"before it called {module_name(watch, culprit.receiver)}, which only received it"
        after = f"after {module_name(watch, culprit.after)} had returned and " if culprit.after is not None else ""
        sure = "" if culprit.certain else " (the closest that can be told: the model was not called as model(...))"
        return f"{maker} made it in its own code, {after}{before}{sure}."
    if culprit.after is not None:
        last = module_name(watch, culprit.after)
        return f"{maker} made it in its own code, after its child {last} had returned a finite output."
    return f"{maker} made it: its inputs and its parameters are finite."


def _evidence(watch: Watch, culprit: Blame) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if culprit.receiver is not None:
        found["received_by"] = watch.tap.names[culprit.receiver]
    if culprit.after is not None:
        found["after"] = watch.tap.names[culprit.after]
    if culprit.masked_rows:
        found["input_rows_all_neg_inf"] = culprit.masked_rows
    return found


def _likely_output(watch: Watch, culprit: Blame, stats: TensorStats) -> list[str]:
    likely: list[str] = []
    module = watch.tap.modules[culprit.index] if culprit.index is not None else None
    receiver = watch.tap.modules[culprit.receiver] if culprit.receiver is not None else None
    if culprit.masked_rows:
        likely.append("all_masked_row")
    limit = _HALF_MAX.get(stats.dtype)
    if limit is not None and (stats.pos_inf or _near(stats, limit)):
        likely.append("overflow_half")
    if isinstance(module, (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)):
        likely.append("zero_std")
    if isinstance(receiver, nn.Linear) and stats.nan and _looks_like_attention(watch, culprit):
        likely.append("all_masked_row")
    if stats.pos_inf and limit is None:
        likely.append("exp_overflow")
    likely += ["log_or_div_zero", "negative_root"] if stats.nan and culprit.after is not None else []
    return likely


def _near(stats: TensorStats, limit: float) -> bool:
    top = max(abs(stats.finite_min or 0.0), abs(stats.finite_max or 0.0))
    return top > limit / 10


def _looks_like_attention(watch: Watch, culprit: Blame) -> bool:
    name = watch.tap.names[culprit.index or 0] + type(watch.tap.modules[culprit.index or 0]).__name__
    return "att" in name.lower()


def bad_output_late(
    watch: Watch, places: list[Place], number: int, extremes: list[float], *, evaluation: bool
) -> Finding:
    """A module's input or output was bad, read with the step; the first bad one in order is where it began."""
    place, tap = places[number], watch.tap
    low, high = extremes
    module = tap.modules[place.module]
    before = [known for known in places[:number] if not known.entering]
    last = before[-1].module if before else None
    state = bad_state(module, tap.names[place.module], deep=True)
    if state is not None and not place.entering:
        user = module_name(watch, place.module)
        return bad_parameter(watch, *state, Moment.FORWARD, origin=f"{user} was the first to use it.")
    shape = f"shape {list(place.shape)}, {place.dtype}, minimum {low:g}, maximum {high:g}"
    side = "Input" if place.entering else "Output"
    where = f"{side} {place.position or '[0]'} of {module_name(watch, place.module)}" if place.entering else (
        f"The output of {module_name(watch, place.module)}"
    )
    common: dict[str, Any] = {
        **_here(watch, Moment.BEFORE_STEP),
        "where": None,
        "evaluation": evaluation,
        "evidence": {"shape": list(place.shape), "dtype": place.dtype, "minimum": low, "maximum": high},
    }
    if place.entering and place.module == 0:
        origin = "The batch was non-finite before the model was called; no module made it."
        return finding(
            "GG103", f"{where} is non-finite ({shape}).", module="", position=f"input{place.position}", origin=origin,
            module_class=type(module).__name__, **common,
        )
    maker = _caller(watch, place.module) if place.entering else place.module
    inside = last if last is not None and _is_inside(tap.names[last], tap.names[maker]) else None
    receiver = place.module if place.entering else None
    culprit = Blame(maker, receiver, inside)
    return finding(
        "GG101", f"{where} is non-finite ({shape}).", module=tap.names[maker],
        module_class=type(tap.modules[maker]).__name__, origin=_origin(watch, culprit),
        position=f"output{place.position}" if receiver is None else f"input{place.position} of the receiver",
        likely=["overflow_half"] if place.dtype == "float16" else [],
        **{**common, "evidence": {**common["evidence"], **_evidence(watch, culprit)}},
    )  # fmt: skip


def _caller(watch: Watch, index: int) -> int:
    """The module whose code calls this one: the nearest around it that is not a mere container."""
    places = {name: place for place, name in enumerate(watch.tap.names)}
    path = watch.tap.names[index]
    while path:
        path = path.rpartition(".")[0]
        place = places.get(path)
        if place is not None and not isinstance(watch.tap.modules[place], (nn.ModuleList, nn.ModuleDict)):
            return place
    return 0


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(outer + ".")


def bad_loss(watch: Watch, value: float | None, stats: TensorStats | None, **more: Any) -> Finding:
    """The loss is bad although everything the model gave out was finite; `value` is None where the model made it."""
    if value is not None:
        seen = f"The loss that backward() was called on is {value}."
    else:
        seen = f"The loss that the model returned is {'NaN' if stats and stats.nan else 'infinite'}."
    labels = ignored_labels(watch)
    nothing_to_learn = labels is not None and labels["supervised"] == 0
    if labels and nothing_to_learn:
        seen += f" 0 of {labels['labels']} target positions are supervised (all are {labels['ignore_index']})."
    words: dict[str, Any] = {
        **_here(watch, Moment.BEFORE_BACKWARD if value is not None else Moment.FORWARD),
        "origin": "Every watched module output was finite: the code between the model's output and backward() made it.",
        **more,
    }
    if value is None:
        words |= {"module": "", "module_class": type(watch.model).__name__}
    likely = ["all_labels_ignored"] if nothing_to_learn else []
    return finding("GG102", seen, likely=likely, tensor=stats, evidence=labels or {}, **words)


def ignored_labels(watch: Watch, ignore_index: int = -100) -> dict[str, Any] | None:
    """Supervised positions among the integer inputs of the model that hold `ignore_index`; None if none does."""
    for position, tensor in walk(watch.tap.inputs):
        if tensor.dtype is torch.int64 and tensor.numel() and bool((tensor == ignore_index).any()):
            return {
                "position": position,
                "labels": tensor.numel(),
                "supervised": int((tensor != ignore_index).sum()),
                "ignore_index": ignore_index,
            }
    return None


def bad_gradient(watch: Watch, bad: dict[str, TensorStats], micro_batch: int) -> Finding:
    """Gradients are bad although the forward was clean; the first in backward order is the last module that ran."""
    ranks = {watch.tap.names[index]: rank for rank, index in enumerate(watch.tap.order)}
    first = max(bad, key=lambda name: ranks.get(watch.owner_of(name)[0], -1))
    module, kind = watch.owner_of(first)
    stats = bad[first]
    half = stats.dtype == "float16"
    others = [name for name in bad if name != first]
    also = f" {len(others)} other gradients are non-finite too." if others else " All other gradients are finite."
    here = _here(watch, Moment.AFTER_BACKWARD)
    return finding(
        "GG104",
        f"The gradient of `{first}` holds {amount(stats)}; loss and module outputs were finite.{also}",
        likely=["half_overflow"] if half else _likely_gradient(others),
        module=module,
        module_class=kind,
        parameter=first,
        tensor=stats,
        origin="First in backward order: everything after it in the forward has a finite gradient, so backward() made "
        f"it in `{module or 'the model itself'}` or in the code just after it.",
        evidence={"bad_gradients": [first, *others][:10], "bad_gradient_count": len(bad)},
        **{**here, "micro_batch": micro_batch - 1},
    )


def _likely_gradient(others: list[str]) -> list[str]:
    return [] if others else ["hook_or_manual"]


def step_made(watch: Watch, name: str, stats: TensorStats, seen: Observation) -> Finding:
    """A parameter or buffer was finite before the step and is not after it."""
    module, kind = watch.owner_of(name)
    here = {**_here(watch, Moment.AFTER_STEP), "step": seen.step, "micro_batch": None}
    if name not in watch.parameters:
        return finding(
            "GG107", f"Buffer `{name}` holds {amount(stats)} after step {seen.step}; it was finite after the step before.",
            likely=["batchnorm_stats"] if "running_" in name else [], module=module, module_class=kind, parameter=name,
            tensor=stats, **here,
        )  # fmt: skip
    optimizer = watch.optimizers[seen.optimizer]
    eps = next((group["eps"] for group in optimizer.param_groups if "eps" in group), None)
    dtype = watch.parameters[name].dtype
    lost = eps is not None and float(torch.tensor(eps, dtype=dtype)) == 0.0
    note = f" Its eps of {eps:g} is 0 in {stats.dtype}." if lost else ""
    bad_lr = any(lr - lr != 0.0 for lr in seen.lr)
    return finding(
        "GG106",
        f"Parameter `{name}` holds {amount(stats)} after step {seen.step} of {type(optimizer).__name__}. It was finite "
        f"before the step, and so were all gradients.{note}",
        likely=["adam_eps_half"] if lost else ["lr_nonfinite"] if bad_lr else [],
        module=module,
        module_class=kind,
        parameter=name,
        tensor=stats,
        origin=f"{type(optimizer).__name__}.step() made it.",
        evidence={"optimizer": type(optimizer).__name__, "eps": eps, "lr": list(seen.lr)},
        **here,
    )


def mask_seen(watch: Watch, index: int, position: str, stats: TensorStats) -> Finding:
    """An output with -inf as a mask has it; only recorded."""
    return finding(
        "GG109",
        f"The output of {module_name(watch, index)} holds {amount(stats)}, and neither NaN nor +inf.",
        module=watch.tap.names[index],
        module_class=type(watch.tap.modules[index]).__name__,
        position=f"output{position}",
        tensor=stats,
        **_here(watch, Moment.FORWARD),
    )


def scaler_stuck(watch: Watch, skipped: int) -> Finding:
    """The GradScaler finds no scale at which the gradients are finite."""
    return finding(
        "GG110",
        f"GradScaler has skipped {skipped} steps in a row: no parameter has moved since.",
        **_here(watch, Moment.BEFORE_STEP),
    )


