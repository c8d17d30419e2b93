"""`gpt_guard.replay`: run the step of a bundle again, in a process that has nothing of the run but its code."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpt_guard.blackbox.bundle import Bundle, read_bundle
from gpt_guard.blackbox.likeness import Likeness, environment_changes, likeness
from gpt_guard.blackbox.source import environment_of
from gpt_guard.blackbox.stored import FileName, plain_path, rebuilt
from gpt_guard.blackbox.weights import Placing, put_weights
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.optimizer import unwrap as plain_optimizers
from gpt_guard.records import Finding
from gpt_guard.records.render import WIDTH, clean, render_finding, render_short, some
from gpt_guard.replaying.recipe import Recipe, ReplayOutcome, target_of, with_outcome
from gpt_guard.replaying.run import replay_step

DEFAULT_LIMIT_S = 300.0
"""A person waits for this one; the replay inside of a run has a much shorter limit."""

_MOST_SETTINGS = 8
_NOT_HELD = (
    "What no bundle brings back may decide: arguments that the model was built with, state that the forward keeps in "
    "Python objects, the time, other threads."
)
_MENDED = "say so: --mended (mended=True in Python)."


def replay(
    bundle: str | os.PathLike[str] | Bundle,
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    buffers: bool = True,
    mended: bool = False,
    limit_s: float | None = DEFAULT_LIMIT_S,
) -> Replayed:
    """Load a bundle into a model, in place, and run the step that failed again, operation by operation.

    The model must have the parameters and buffers of the one that failed; where the bundle has no weights, since they
    were too large for it, those that the model has are used. Nothing in the bundle is executed.

    - `optimizer`: one or several, whose state is loaded too, to go on stepping by hand; the replay needs none.
    - `loss_fn`: the function that was given to `guardian.watch_loss`, where the loss lies outside of the model.
    - `args`, `kwargs`: what to call the model with instead of what was recorded.
    - `buffers`: False keeps the buffers that the model was built with, such as one that was uninitialised and is not.
    - `mended`: True says that whatever is other than in the run was changed to mend the fault: a step that runs through
      is then an answer, even where the model has other classes or its code is what it was.
    - `limit_s`: seconds, or None for no limit.

    Raises GuardUsageError for a bundle that cannot be used, or that does not fit the model.
    """
    if not isinstance(model, nn.Module):
        raise GuardUsageError(f"model is a {type(model).__name__}, not an nn.Module. Write replay(bundle, model)")
    opened = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    recorded = opened.recipe.loss
    like = likeness(opened.source, model, None if recorded is None else recorded.function, loss_fn)
    notes = _load(opened, model, plain_optimizers(optimizer), buffers)
    given = args is not None or kwargs is not None
    recipe = _recipe(opened, model, loss_fn, args, kwargs)
    recipe = replace(recipe, notes=(*recipe.notes, *_other(opened, given=given, buffers=buffers)))
    holes = [] if given else _holes(opened)
    if recorded is not None and loss_fn is None:
        notes.append(
            f"the loss function {recorded.function} was not run: give it as loss_fn (--loss package.module:function)"
        )
    notes += environment_changes(opened.environment, environment_of(model))
    outcome = _run(model, recipe, limit_s)
    if holes and not outcome.reproduced:
        # A forward that fails over a hole, or goes another way because of it, says nothing about the fault.
        raise GuardUsageError(
            f"{opened.path}: {some(holes)} is no plain data and was left out; give the inputs: "
            f"gpt_guard.replay(bundle, model, args=..., kwargs=...)"
        )
    notes += [f"None was given for {some(holes)}, which is no plain data"] if holes else []
    result = _replayed(opened, recipe, outcome, notes, like)
    return replace(result, mended=mended, other_step=given or not buffers)


def _run(model: nn.Module, recipe: Recipe, limit_s: float | None) -> ReplayOutcome:
    outcome = replay_step(model, recipe, limit_s=limit_s)
    if recipe.finding is None or target_of(recipe.finding) is None:
        return _whole_forward(outcome)
    if not outcome.reproduced and outcome.decided:
        # The tensor of the finding is good; a step that fails elsewhere is not mended all the same.
        elsewhere = _whole_forward(replay_step(model, replace(recipe, finding=None), limit_s=limit_s))
        return elsewhere if elsewhere.reproduced else outcome
    return outcome


def _other(bundle: Bundle, *, given: bool, buffers: bool) -> Iterator[str]:
    """What the person has asked for, or the bundle lacks, and that is therefore not what was recorded."""
    if given:
        yield "The inputs are those that were given now."
    if not bundle.has(FileName.MODEL):
        yield "The weights are the model's own."
    elif not buffers:
        yield "The buffers are those that the model was built with."


def _holes(bundle: Bundle) -> list[str]:
    return [path for path in bundle.manifest.holes if path.startswith(("args[", "kwargs["))]


def _whole_forward(outcome: ReplayOutcome) -> ReplayOutcome:
    """The answer where not one tensor but the whole forward is the question; what it masks away again is no fault."""
    operation = outcome.operation
    if operation is None:
        return outcome
    if operation.hidden is not None:
        masked = f"The forward was run again and ends well: {operation.hidden} masks away what is non-finite in it."
        return replace(outcome, reproduced=False, text=masked, operation=None)
    return replace(outcome, text=f"The forward was run again: {operation.shows}")


def _load(bundle: Bundle, model: nn.Module, optimizers: Sequence[Optimizer], buffers: bool) -> list[str]:
    notes: list[str] = []
    if bundle.has(FileName.MODEL):
        notes += put_weights(model, bundle.path / FileName.MODEL, bundle.weights(), buffers=buffers)
    else:
        notes.append(f"not in the bundle: {bundle.why_absent(FileName.MODEL)}; the model's own weights were used")
    if optimizers:
        _load_optimizers(bundle, optimizers)
    return notes


def _load_optimizers(bundle: Bundle, optimizers: Sequence[Optimizer]) -> None:
    states = bundle.optimizer_states()
    if len(states) != len(optimizers):
        raise GuardUsageError(f"{bundle.path} holds the state of {len(states)} optimizers, {len(optimizers)} are given")
    for optimizer, state in zip(optimizers, states, strict=True):
        try:
            optimizer.load_state_dict(state)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise GuardUsageError(
                f"{type(optimizer).__name__} does not take the state in {bundle.path / FileName.OPTIMIZER}: {error}"
            ) from error


def _recipe(
    bundle: Bundle,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> Recipe:
    _check_recorded(bundle, loss_fn, given=args is not None or kwargs is not None)
    placing = Placing(model, bundle.environment.get("device", "cpu"), bundle.manifest.devices)
    tensors = {
        name: {key: value if name is FileName.RNG else placing.put(value, key) for key, value in content.items()}
        for name, content in bundle.recipe_tensors().items()
    }
    if args is not None or kwargs is not None:
        tensors[FileName.BATCH] = {"args": tuple(args or ()), "kwargs": dict(kwargs or {})}
    return rebuilt(bundle.recipe, model, tensors, bundle.modes, loss_fn)


def _check_recorded(bundle: Bundle, loss_fn: Callable[..., Any] | None, *, given: bool) -> None:
    if bundle.recipe.ambient is None:
        raise GuardUsageError(
            f"{bundle.path}: no forward was recorded, so there is nothing to run again ({bundle.finding.code} "
            f"{bundle.finding.title}); finding.json and model.pt show the state it was found in"
        )
    if bundle.recipe.alone and loss_fn is None and bundle.recipe.loss is not None:
        raise GuardUsageError(
            f"{bundle.path}: the loop called parts or methods of the model, and what can be run again is the loss "
            f"function {bundle.recipe.loss.function}: give it as loss_fn (--loss package.module:function)"
        )
    if not given and not bundle.has(FileName.BATCH):
        raise GuardUsageError(
            f"{bundle.path}: the inputs are not in the bundle ({bundle.why_absent(FileName.BATCH)}); give them: "
            f"gpt_guard.replay(bundle, model, args=..., kwargs=...)"
        )
    if loss_fn is not None and bundle.recipe.loss is None:
        raise GuardUsageError(
            f"{bundle.path} has no call of a loss function: it is recorded where the run calls "
            f"guardian.watch_loss(function). What can be run again is the model: leave the loss function out"
        )


def _replayed(bundle: Bundle, recipe: Recipe, outcome: ReplayOutcome, notes: Sequence[str], like: Likeness) -> Replayed:
    guards = recipe.finding or bundle.finding
    if target_of(guards) is None:  # the guard itself has seen all that there is to be seen
        finding = guards.model_copy(update={"replay": outcome.text, "operation": outcome.operation})
    else:
        finding = with_outcome(guards, outcome)
    reproduced = outcome.reproduced if outcome.decided else None
    same = _same(bundle.finding, finding) if reproduced else None
    settings = [] if same else like.settings[:_MOST_SETTINGS]  # such as a counter, which a new model has at its start
    return Replayed(bundle, outcome, finding, reproduced, same, (*settings, *notes), like)


def _same(recorded: Finding, now: Finding) -> bool:
    """Whether both name the same operation in the same module; where none was named, the same tensor."""
    before, after = recorded.operation, now.operation
    if before is not None and after is not None:
        return (before.name, before.phase) == (after.name, after.phase) and _path(before.module) == _path(after.module)
    if after is None or after.kind == "operation":
        return before is None and _path(recorded.module) == _path(now.module)
    return after.kind == "input" if recorded.parameter is None else after.name == now.parameter


def _path(module: str | None) -> str | None:
    return None if module is None else plain_path(module)


@dataclass(frozen=True)
class Replayed:
    """What running a bundle's step again has shown.

    `reproduced` is True where the fault is still there, False where the step runs through without it, None where the
    replay came to no answer. `gone` is the answer to a person who has changed something. `finding` is told as the
    exception tells it, `same` says whether operation and module are those of the bundle. `notes` name what is not as
    it was when the bundle was written, `likeness` what is not so of the model and its code. `mended` is what the
    person said; `other_step` tells that the step itself was not the recorded one, since other inputs were given.
    """

    bundle: Bundle
    outcome: ReplayOutcome
    finding: Finding
    reproduced: bool | None
    same: bool | None
    notes: tuple[str, ...] = ()
    likeness: Likeness = field(default_factory=Likeness)
    mended: bool = False
    other_step: bool = False

    @property
    def gone(self) -> bool | None:
        """Whether the fault is gone; None where a step that runs through does not show it.

        That is where model, weights or loss function are not what failed, or nothing is known to have been changed.
        """
        if self.reproduced is not False:
            return None if self.reproduced is None else False
        return None if self._doubt else True

    @property
    def _doubt(self) -> str | None:
        """Why a step that runs through is no answer, and what would be one; None where it is."""
        text, like = self.outcome.text, self.likeness
        if self.mended:
            return None
        if like.parts:
            return (
                f"the fault does not show, but this is not what failed. Give what builds that model, and the same loss "
                f"function. If the difference is what has mended it, {_MENDED} {text}"
            )
        if not self.bundle.has(FileName.MODEL):
            return (
                f"the fault does not show, but the weights are not those that failed, which the bundle does not have. "
                f"If the model was given them by other means, {_MENDED} {text}"
            )
        if like.unedited and not self.other_step:
            return (
                f"the fault does not show, although the code is what it was in the run ({some(like.unedited)}): "
                f"nothing says that it is gone. {text} {_NOT_HELD} If something besides the code was changed to mend "
                f"it, {_MENDED}"
            )
        return None

    def __str__(self) -> str:
        shown = render_finding(self.finding) if self.reproduced else render_short(self.finding)
        notes = [f"not as recorded: {note}" for note in self.notes]
        other = self.likeness.parts
        first = [_filled(f"Not what the bundle was made of: {_listed(other)}.")] if other else []
        return "\n\n".join([*first, shown, *map(_filled, (self.verdict, *notes))])

    @property
    def verdict(self) -> str:
        """The answer in a few sentences."""
        text = self.outcome.text
        if self.reproduced is None:
            return f"No answer: {text}"
        if self.reproduced:
            same = "The same fault at the same place."
            return f"{same if self.same else 'A fault at another place than the one recorded.'} {text}"
        if self._doubt:
            return f"No answer: {self._doubt}"
        return f"The fault does not show any more. {self._why}"

    @property
    def _why(self) -> str:
        text, edited = self.outcome.text, self.likeness.edited
        if self.mended or self.other_step:
            return text
        if edited:
            return f"The code was changed since: {some(edited)}. If that has not mended it: {text} {_NOT_HELD}"
        return f"If the code was changed since, it is gone; if it was not: {text} {_NOT_HELD}"


def _listed(parts: tuple[str, ...]) -> str:
    return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


def _filled(text: str) -> str:
    return textwrap.fill(clean(text), WIDTH, break_on_hyphens=False)
