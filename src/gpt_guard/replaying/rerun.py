"""Rerun: a failing step once more, operation by operation, with the same inputs, weights and random numbers."""

from __future__ import annotations

import time
from collections.abc import Collection

from torch import Tensor, nn

from gpt_guard.replaying.backward import backward_again
from gpt_guard.replaying.bench import Bench, Seen
from gpt_guard.replaying.forward import first_again, forward_again, loss_again, outside_again
from gpt_guard.replaying.inside import inside_again
from gpt_guard.replaying.original import why_not
from gpt_guard.replaying.outcome import Outcome, not_reproduced, reproduced
from gpt_guard.replaying.recipe import Recipe
from gpt_guard.replaying.stubs import OutOfReach
from gpt_guard.replaying.target import target_of
from gpt_guard.replaying.text import place_of_error
from gpt_guard.replaying.trace import TimeUp, make_ready

DEFAULT_LIMIT_S = 10.0


def replay_step(
    model: nn.Module,
    recipe: Recipe,
    *,
    limit_s: float | None = DEFAULT_LIMIT_S,
    changing: Collection[Tensor] = (),
    live: bool = False,
) -> Outcome:
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
        return Outcome(False, why, finding=recipe.finding, decided=False)
    make_ready()
    bench = Bench(model, recipe, limit_s=limit_s, changing=changing, live=live)
    try:
        seen = _run(bench)
    except TimeUp:
        # What was seen by then is no answer: the tensor itself had not been reached.
        seen = Seen(False, f"Not reproduced: the replay was stopped at its limit of {limit_s:g} s.", place=True)
    except OutOfReach as error:
        seen = Seen(False, str(error), place=True)
    except Exception as error:
        what = f"the replay ended in {type(error).__name__}: {error}{place_of_error(error)}."
        seen = Seen(False, f"Not reproduced: {what}", place=True)
    seconds = time.perf_counter() - began
    notes = [*recipe.notes, *bench.notes]
    if seen.reproduced:
        text = reproduced(seen.said, notes)
    elif seen.place or recipe.finding is None:
        text = " ".join([seen.said, *notes])
    else:
        text = not_reproduced(seen.said, notes, sorted(bench.random), bench.own, live=live)
    return Outcome(seen.reproduced, text, seen.operation, recipe.finding, seconds, decided=not seen.place)


def _run(bench: Bench) -> Seen:
    recipe = bench.recipe
    target = None if recipe.finding is None else target_of(recipe.finding)
    if target is None:
        return first_again(bench)
    if recipe.inside and target.kind in ("loss", "gradient"):
        return inside_again(bench, target)
    if target.kind == "gradient":
        return backward_again(bench, target)
    if target.kind != "loss":
        return forward_again(bench, target)
    return outside_again(bench) if recipe.loss is None else loss_again(bench, recipe.loss)
