"""Run a failing step once more, operation by operation, with the same inputs, weights and random numbers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor, nn

from gpt_guard.replaying.isolation import OutOfReach
from gpt_guard.replaying.passes import (
    backward_again,
    first_again,
    forward_again,
    inside_again,
    loss_again,
    outside_again,
)
from gpt_guard.replaying.recipe import Recipe, ReplayOutcome, target_of
from gpt_guard.replaying.step_runner import StepRunner, why_not
from gpt_guard.replaying.trace import TimeUp, make_ready

DEFAULT_LIMIT_S = 10.0


def replay_step(
    model: nn.Module,
    recipe: Recipe,
    *,
    limit_s: float | None = DEFAULT_LIMIT_S,
    changing: Collection[Tensor] = (),
    live: bool = False,
) -> ReplayOutcome:
    """Run a step again until the tensor of its finding goes bad, and say which operation made it so.

    Without a finding, the forward is run to its end and the first operation that makes non-finite values of finite
    ones is told, if there is one. Leaves weights, buffers, gradients, generators, modes and attributes as they were;
    see `untouched` for what is out of reach. Hooks that the user has on modules run again, since what they return is
    part of the forward; those of gpt_guard must be paused by the caller. Gradients are taken by `torch.autograd.grad`,
    which leaves `.grad` alone and fires neither DistributedDataParallel nor an optimizer that steps inside of backward.

    Never raises: what goes wrong is said in the outcome. `limit_s` is in seconds, None for no limit; `changing` are
    parameters that the forward is known to write to. `live` tells that the loop of the step is still running: from
    iterators, queues and files that it goes on reading nothing is taken. Reads the device at every operation.
    """
    began = time.perf_counter()
    if (why := why_not(model)) is not None:
        return ReplayOutcome(False, why, finding=recipe.finding, decided=False)
    make_ready()
    run = StepRunner(model, recipe, limit_s=limit_s, changing=changing, live=live)
    try:
        outcome = _run(run)
    except TimeUp:
        # What was seen by then is no answer: the tensor itself had not been reached.
        text = f"Not reproduced: the replay was stopped at its limit of {limit_s:g} s."
        outcome = ReplayOutcome(False, text, decided=False)
    except OutOfReach as error:
        outcome = ReplayOutcome(False, str(error), decided=False)
    except Exception as error:
        text = f"Not reproduced: the replay ended in {type(error).__name__}: {error}{_raised_at(error)}."
        outcome = ReplayOutcome(False, text, decided=False)
    seconds = time.perf_counter() - began
    notes = [*recipe.notes, *run.notes]
    if outcome.reproduced:
        text = reproduced(outcome.text, notes)
    elif not outcome.decided or recipe.finding is None:
        text = " ".join([outcome.text, *notes])
    else:
        text = not_reproduced(outcome.text, notes, sorted(run.random), run.own, live=live)
    return replace(outcome, text=text, finding=recipe.finding, seconds=seconds)


def _run(run: StepRunner) -> ReplayOutcome:
    recipe = run.recipe
    target = None if recipe.finding is None else target_of(recipe.finding)
    if target is None:
        return first_again(run)
    if recipe.inside and target.kind in ("loss", "gradient"):
        return inside_again(run, target)
    if target.kind == "gradient":
        return backward_again(run, target)
    if target.kind != "loss":
        return forward_again(run, target)
    return outside_again(run) if recipe.loss is None else loss_again(run, recipe.loss)


def _raised_at(error: BaseException) -> str:
    """The file and line in which an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def reproduced(compared: str, notes: Sequence[str]) -> str:
    """What was compared, and what is known to differ although it has come out the same."""
    if notes:
        return " ".join([f"Reproduced: {compared}, although not everything is as it was.", *notes])
    return f"Reproduced: {compared}, with the same inputs, weights and random numbers."


def not_reproduced(
    compared: str, notes: Sequence[str], nondeterministic: Sequence[str], own: Sequence[str] = (), *, live: bool = True
) -> str:
    """Why a replay may show something else, and what to switch on, in sentences.

    `live` tells that the model is the very one that failed: one that was built anew may differ in more than is listed.
    """
    parts = [f"Not reproduced: {compared}", *notes]
    if nondeterministic:
        listed = ", ".join(nondeterministic[:5])
        parts.append(
            f"Operations without a fixed order of summation ran: {listed}. torch.use_deterministic_algorithms(True) "
            f"makes them repeatable."
        )
    if own:
        listed = ", ".join(f"`{name}`" for name in dict.fromkeys(own[:5]))
        parts.append(
            f"The forward writes to state of its own ({listed}), and what that was when the failed forward began is "
            f"not kept."
        )
    if live and not notes and not nondeterministic and not own:
        parts.append(
            "Something outside of inputs, weights and torch's generators differs: state that the forward keeps in "
            "Python objects, time, other threads, or another generator."
        )
    return " ".join(parts)
