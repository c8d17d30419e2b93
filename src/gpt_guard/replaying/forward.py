"""The forward again, up to the tensor that was bad; and the loss function, where the loss is computed outside."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpt_guard.hooks.tensors import describe, looks_bad, walk
from gpt_guard.records import OperationSeen
from gpt_guard.replaying.bench import Bench, Seen
from gpt_guard.replaying.original import module_at
from gpt_guard.replaying.recipe import LossRecipe
from gpt_guard.replaying.target import Sighting, Target
from gpt_guard.replaying.text import figures, outputs_named


def forward_again(bench: Bench, target: Target) -> Seen:
    """Run until an output or input of a module goes bad."""
    sighting = Sighting(target)
    module = module_at(bench.model, target.module)
    if module is None:
        return Seen(False, f"the model has no module `{target.module}`.")
    with bench.traced(bench.starts) as trace, sighting.watching(module):
        bench.call()
    if sighting.tensor is not None:
        again = f"{target} is non-finite again"
        return Seen(True, again, trace.origin(sighting.tensor))
    if sighting.last is None:
        return Seen(False, f"{target} did not come up when the step was run again.")
    other = trace.first()
    elsewhere = "" if other is None else f" Elsewhere in it, {other.shows}."
    return Seen(False, f"{target} is {figures(sighting.last)} in the replay.{elsewhere}")


def first_again(bench: Bench) -> Seen:
    """Run the whole forward of a step that nobody has found bad, and tell the first operation that is."""
    with bench.traced(bench.starts) as trace:
        output = bench.call()
    operation = trace.first()
    if operation is not None:
        return Seen(True, "The forward was run again.", operation)
    shown = outputs_named(output, tuple(position for position, _ in walk(output)))
    return Seen(False, f"Every operation of the forward gave finite values of finite ones; {shown}.")


def outside_again(bench: Bench) -> Seen:
    """The loss was computed by code that is not known: run the model's part, and say between which tensors it fails."""
    with bench.traced(bench.starts) as trace:
        output = bench.call()
    reached = bench.recipe.reached or tuple(position for position, _ in walk(output))
    named = outputs_named(output, reached)
    bad = _first_bad(output, reached) or _first_infinite(output, reached)
    said = "The code between there and backward() made the loss non-finite."
    if bad is not None and bad[1].numel() == 1:
        # A single number is no mask: it is the loss, or a part of it.
        return Seen(True, f"the loss that the model returned is {figures(bad[1])} again", trace.origin(bad[1]))
    if bad is not None:
        said = (
            f"That comes from {_made(trace.origin(bad[1]))}. Unless the code between there and backward() leaves those "
            f"elements out, they made the loss non-finite."
        )
    wrap = "Wrap that code as guardian.watch_loss(function) to have its operation and line named."
    return Seen(False, f"The model's part was run again: {named}. {said} {wrap}", place=True)


def _first_infinite(output: Any, positions: tuple[str, ...]) -> tuple[str, Tensor] | None:
    """An output that holds -inf only, as a mask does, and so is not what a guard stops at; a single number first."""
    found = [each for each in walk(output) if each[0] in positions and describe(each[1]) is not None]
    return next((each for each in found if each[1].numel() == 1), found[0] if found else None)


def _made(operation: OperationSeen | None) -> str:
    if operation is None:
        return "an operation that could not be followed"
    module = f" in `{operation.module}`" if operation.module else ""
    return f"{operation.shows}{module}" + (f" at {operation.where}" if operation.where is not None else "")


def loss_again(bench: Bench, loss: LossRecipe) -> Seen:
    """Run the loss function on the very tensors that it was given."""
    with bench.traced(loss.ambient) as trace:
        result = loss.function(*loss.args, **loss.kwargs)
    positions = tuple(position for position, _ in walk(result))
    infinite = _first_infinite(result, positions)
    # -inf in a single number is a loss; in more of them it may be a mask that is returned beside the loss.
    bad = _first_bad(result, positions) or (infinite if infinite is not None and infinite[1].numel() == 1 else None)
    if bad is not None:
        return Seen(True, "the loss is non-finite again", trace.origin(bad[1]))
    return Seen(False, f"the loss function returned {figures_of(result)} when it was run again on the same tensors.")


def figures_of(result: Any) -> str:
    """What a loss function returned, in figures."""
    return ", ".join(figures(tensor) for _, tensor in walk(result)) or type(result).__name__


def _first_bad(output: Any, positions: tuple[str, ...]) -> tuple[str, Tensor] | None:
    for position, tensor in walk(output):
        if position in positions and looks_bad(tensor) is not None:
            return position, tensor
    return None
