"""What FiniteGuard says of parameters and buffers: bad before a forward used them, or made so by a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from gpt_guard.callbacks.finite.finite_step_causes import could_not_have, eps_of, step_causes
from gpt_guard.callbacks.finite.finite_words import GUARD, amount
from gpt_guard.catalogue import finding
from gpt_guard.hooks.state import BadState, StateWatch
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, TensorStats

_LISTED = 10
# Tables that are computed once and never updated.
_TABLES = ("inv_freq", "cos", "sin", "cos_cached", "sin_cached", "freqs", "freqs_cis", "pe", "alibi")


def bad_at_step(watch: Watch, name: str, stats: TensorStats, here: dict[str, Any]) -> Finding:
    """A parameter was bad when the Guardian was entered, still is, and is about to be stepped."""
    when = "It was so when the Guardian was entered, and has a gradient now."
    state = BadState(name, watch.parameters[name], stats, True)
    return _bad_state(watch, state, when, ["loaded_so", "uninitialised"], here)


def bad_before(watch: Watch, state: StateWatch, bad: BadState, origin: str, here: dict[str, Any]) -> Iterator[Finding]:
    """A parameter or buffer was bad before this forward used it; nothing if it has been spoken of already."""
    name = watch.name_of(bad.tensor) or bad.name
    if name not in state.told:
        known = "entry" if name in state.at_start else "good" if state.watches(name) else "unknown"
        state.ignore(name)
        yield _before_use(watch, bad, origin, known, here)


def _before_use(watch: Watch, state: BadState, origin: str, known: str, here: dict[str, Any]) -> Finding:
    """`known` says how it was when last looked at."""
    likely = {"entry": ["loaded_so", "uninitialised"], "good": ["changed_outside_step"], "unknown": []}[known]
    when = {
        "entry": "It was so when the Guardian was entered.",
        "good": f"It was finite when last measured: something other than optimizer.step() has changed it before step "
        f"{here['step']}.",
        "unknown": "It was so before this forward used it.",
    }[known]
    if not state.is_parameter:
        likely = [cause for cause in likely if cause == "loaded_so"] + _buffer_causes(watch, state.name)
    return _bad_state(watch, state, when, likely, here, origin=origin)


def _bad_state(
    watch: Watch, state: BadState, when: str, likely: list[str], here: dict[str, Any], **more: Any
) -> Finding:
    # A shared parameter goes by its first name, as everywhere else.
    name = watch.name_of(state.tensor) or state.name
    module, kind = watch.owner_of(name)
    return finding(
        "GG105" if state.is_parameter else "GG107",
        f"{'Parameter' if state.is_parameter else 'Buffer'} `{name}` holds {amount(state.stats)}. {when}",
        likely=likely,
        module=module,
        module_class=kind,
        parameter=name,
        tensor=state.stats,
        guard=GUARD,
        **here,
        **more,
    )


def _buffer_causes(watch: Watch, name: str) -> list[str]:
    """GG107's causes by the class of the module that holds a buffer."""
    path, _, key = name.rpartition(".")
    try:
        owner = watch.model.get_submodule(path)
    except AttributeError:
        return []
    if isinstance(owner, nn.modules.batchnorm._NormBase):
        return ["batchnorm_stats"]
    return ["computed"] if key in _TABLES else ["running_average", "computed"]


def bad_after_step(
    watch: Watch,
    bad: Mapping[str, TensorStats],
    seen: Observation,
    written: set[str],
    *,
    light: bool = False,
    since: int | None = None,
) -> list[Finding]:
    """Parameters and buffers that are bad after a step and were good after the one before: one finding for each kind.

    `written` names those that not only steps have written to. `light`: they were not looked at in the step itself, and
    where nothing in it explains them, a write that torch does not count has made them so after it. `since` is the step
    after which all was known to be finite, where that is not the one before: then it is not known which step it was.
    """
    optimizer = watch.optimizers[seen.optimizer]
    groups: dict[str, list[str]] = {"GG105": [], "GG106": [], "GG107": []}
    for name, stats in bad.items():
        if name not in watch.parameters:
            groups["GG107"].append(name)
        elif (
            name in written or (light and since is None and could_not_have(watch, optimizer, name))
        ) and not step_causes(optimizer, watch.parameters[name], stats, seen):
            groups["GG105"].append(name)
        else:
            groups["GG106"].append(name)
    return [
        _after_step(watch, code, names, bad[names[0]], seen, since, light=light)
        for code, names in groups.items()
        if names
    ]


def _after_step(
    watch: Watch,
    code: str,
    names: list[str],
    stats: TensorStats,
    seen: Observation,
    since: int | None,
    *,
    light: bool,
) -> Finding:
    first, *others = names
    module, kind = watch.owner_of(first)
    optimizer = watch.optimizers[seen.optimizer]
    stepper = type(optimizer).__name__
    evidence: dict[str, Any] = {"bad_tensors": names[:_LISTED], "bad_tensor_count": len(names)} if others else {}
    origin, likely, shown = None, ["changed_outside_step"], list[str]()
    held = f"`{first}` holds {amount(stats)} after step {seen.step}"
    if code == "GG107":
        seen_text = f"Buffer {held}; it was finite after {'the step before' if since is None else f'step {since}'}."
        likely = _buffer_causes(watch, first)
    elif code == "GG105":
        seen_text = (
            f"Parameter {held}. Something wrote to it outside of {stepper}.step() before, and nothing in this step "
            f"could make it non-finite."
        )
        if light:
            seen_text = (
                f"Parameter `{first}` holds {amount(stats)} before step {seen.step + 1}, and was finite before step "
                f"{seen.step}. Nothing in that step could make it so: something wrote to it after it, in a way that "
                f"torch does not count, such as `.data` or numpy."
            )
        origin = f"Not {stepper}.step(): gradient, lr and optimizer state are finite."
    else:
        eps = eps_of(optimizer, watch.parameters[first])
        shown = step_causes(optimizer, watch.parameters[first], stats, seen)
        likely = [*shown] or ["state_poisoned", "lr_overflow"]
        norm = seen.grad_norm_clipped
        known = ", and so were all gradients" if norm is not None and math.isfinite(norm) else ""
        note = f" Its eps of {eps:g} is 0 in {stats.dtype}." if likely[0] == "adam_eps_half" else ""
        seen_text = f"Parameter {held} of {stepper}. It was finite before the step{known}.{note}"
        origin = f"{stepper}.step() made it."
        if since is not None:
            seen_text = (
                f"Parameter {held} of {stepper}. It was finite after step {since}; since then outputs, loss and "
                f"gradients were, and nothing has shown where it became so.{note}"
            )
            origin = f"{stepper}.step() in one of the steps {since + 1} to {seen.step}, or an uncounted write."
        likely += ["uncounted_write"] if light else []
        evidence |= {"optimizer": stepper, "eps": eps, "lr": list(seen.lr)}
    if others:
        what = "buffer" if code == "GG107" else "parameter"
        seen_text += f" {len(others)} other {what}{'s' if len(others) > 1 else ''} became non-finite in the same step."
    return finding(
        code,
        seen_text,
        likely=likely,
        shown=shown,
        unlikely=["adam_eps_half"] if code == "GG106" and stats.dtype != "float16" else (),
        module=module,
        module_class=kind,
        parameter=first,
        tensor=stats,
        origin=origin,
        evidence=evidence,
        step=seen.step + 1 if code == "GG105" and light else seen.step,
        moment=Moment.AFTER_STEP,
        guard=GUARD,
    )
