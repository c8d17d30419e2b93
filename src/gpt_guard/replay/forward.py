"""The forward again, up to the tensor that was bad; and the loss function, where the loss is computed outside."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpt_guard.hooks.tensors import looks_bad, walk
from gpt_guard.replay.bench import Bench, Seen
from gpt_guard.replay.original import module_at
from gpt_guard.replay.recipe import LossRecipe
from gpt_guard.replay.said import figures, outputs_named
from gpt_guard.replay.target import Sighting, Target


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
    bad = _first_bad(output, reached)
    if bad is not None:
        operation = trace.origin(bad[1])
        named = "" if operation is None else f": {operation.shows}"
        return Seen(False, f"output{bad[0]} of the model is non-finite in the replay, and was finite{named}.")
    said = (
        f"The model's part was run again: {outputs_named(output, reached)}. The code between there and backward() made "
        f"the loss non-finite. Wrap that code as guardian.watch_loss(function) to have its operation and line named."
    )
    return Seen(False, said, place=True)


def loss_again(bench: Bench, loss: LossRecipe) -> Seen:
    """Run the loss function on the very tensors that it was given."""
    with bench.traced(loss.ambient) as trace:
        result = loss.function(*loss.args, **loss.kwargs)
    bad = _first_bad(result, tuple(position for position, _ in walk(result)))
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
