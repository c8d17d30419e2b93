"""From what a running loop has captured to recipes that can be run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from gpt_guard.hooks.capture.capture import Capture
from gpt_guard.hooks.capture.captured import ForwardCall, LossCall, versions_of
from gpt_guard.hooks.capture.output_gradients import gradients_of
from gpt_guard.hooks.capture.outputs_reached import bypassed, frontier
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment
from gpt_guard.replaying.recipe import LossRecipe, Recipe
from gpt_guard.replaying.stubs import lend

_NAMED = 3


class Live(NamedTuple):
    """A recipe, and the parameters that have been written to since its forward began."""

    recipe: Recipe
    changing: list[Tensor]


def recipes_for(watch: Watch, capture: Capture, finding: Finding | None) -> Iterator[Live]:
    """The recipes that may have failed, in the order in which they are to be tried; without a finding, the newest."""
    for call in _calls(watch, capture, finding):
        # A call that only stands for a loss function is nothing without it.
        losses: Sequence[LossCall | None] = call.loss_calls or (() if call.alone else (None,))
        for loss in losses:
            yield _live(watch, capture, call, loss, finding)


def _calls(watch: Watch, capture: Capture, finding: Finding | None) -> Sequence[ForwardCall]:
    now = [] if capture.now is None else [capture.now]
    if finding is None:
        return now
    if watch.immediate and finding.moment is Moment.FORWARD:
        # What goes bad while no call of the model runs comes from modules that the loop calls one by one.
        return [call for call in now if call.running]
    if finding.evaluation:
        return [] if capture.evaluation is None else [capture.evaluation]
    wanted = finding.micro_batch
    calls = [call for call in capture.calls if wanted is None or call.micro_batch == wanted]
    # A second backward through a graph that was retained has no forward of its own.
    calls = calls or [call for call in capture.newest() if wanted is not None and call.micro_batch < wanted]
    versions = capture.parameter_versions()
    # A closure runs several forwards in one step, each with other parameters: those that are gone cannot be run.
    return [call for call in calls if call.parameters == versions] or calls


def _live(watch: Watch, capture: Capture, call: ForwardCall, loss: LossCall | None, finding: Finding | None) -> Live:
    versions = zip(watch.model.named_parameters(), call.parameters, capture.parameter_versions(), strict=False)
    changed = {name: parameter for (name, parameter), before, now in versions if before != now}
    ambient = capture.revised(call.ambient)
    first, again = frontier(call.losses, {arrival.number for arrival in call.arrivals})
    reached = [arrival for arrival in call.arrivals if arrival.number in first]
    also = [arrival for arrival in call.arrivals if arrival.number in again]
    recipe = Recipe(
        args=lend(call.args, "args"),
        kwargs=lend(call.kwargs, "kwargs"),
        ambient=ambient,
        reached=tuple(arrival.position for arrival in reached),
        gradients=gradients_of(reached, call.losses),
        also=gradients_of(also, ()),
        finding=finding,
        loss=None if loss is None else _loss(capture, loss, call.losses),
        notes=(
            *_notes(call, loss, list(changed), modes_set=ambient is not call.ambient),
            *(() if call.running or call.alone else _other_ways(watch, capture, call, finding)),
        ),
        step=call.step,
        micro_batch=call.micro_batch,
        evaluation=call.evaluation,
        inside=call.running and not call.alone,
        alone=call.alone,
    )
    return Live(recipe, list(changed.values()))


def _loss(capture: Capture, call: LossCall, losses: Sequence[Tensor]) -> LossRecipe:
    gradients = gradients_of(call.arrivals, losses)
    args, kwargs = lend(call.args, "args"), lend(call.kwargs, "kwargs")
    return LossRecipe(call.function, args, kwargs, capture.revised(call.ambient), gradients, call.calls_model)


def _other_ways(watch: Watch, capture: Capture, call: ForwardCall, finding: Finding | None) -> Iterator[str]:
    """A penalty on weights gives a parameter a gradient that no output of the model has seen."""
    parameter = watch.parameters.get(finding.parameter or "") if finding is not None else None
    # A backward through several calls of the model comes to the parameter through each of them.
    numbers = {arrival.number for other in capture.calls for arrival in other.arrivals}
    if parameter is not None and bypassed(call.losses, numbers, parameter):
        yield (
            f"The loss also depends on `{watch.name_of(parameter)}` directly, as a penalty on weights does, and not "
            f"only through what the model returned: that part was not run again."
        )


def _notes(call: ForwardCall, loss: LossCall | None, changed: Sequence[str], *, modes_set: bool) -> Iterator[str]:
    if versions_of((call.args, call.kwargs)) != call.versions:
        yield "The batch has been written to in place since the forward began: the replay used what it holds now."
    if loss is not None and versions_of((loss.args, loss.kwargs)) != loss.versions:
        yield "What the loss function was given has been written to in place since: the replay used what it holds now."
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        listed = ", ".join(f"`{name}`" for name in changed[:_NAMED]) + more
        yield f"Parameters have been written to since the forward began ({listed}): they were used as they are now."
    if modes_set:
        yield (
            "Modules were put into another mode without a call of `.train()` or `.eval()`: the replay used the modes "
            "that they have now."
        )
    if not call.ambient.random:
        yield "The state of the random generators could not be read while a CUDA graph was being recorded."
