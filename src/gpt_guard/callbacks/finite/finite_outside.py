"""A loss that is bad while all module outputs that were seen are finite: its own code, or what was not seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from gpt_guard.callbacks.finite.finite_context import Context
from gpt_guard.callbacks.finite.finite_loss import loss_outside
from gpt_guard.callbacks.finite.finite_state import bad_before
from gpt_guard.callbacks.updates.param_plan import listed
from gpt_guard.hooks.state import StateWatch, bad_state
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, TensorStats


class Hidden(NamedTuple):
    """Modules whose outputs were not seen, by path (the empty one is the whole model), and why not, as a sentence."""

    paths: list[str]
    why: str


def verdict_on_loss(
    watch: Watch,
    state: StateWatch,
    context: Context,
    loss: Tensor,
    stats: TensorStats,
    untouched: dict[int, int],
    here: dict[str, Any],
) -> Iterator[Finding]:
    """What is said before a backward on such a loss; state that is bad where outputs are not seen explains it."""
    hidden = hidden_from(watch)
    for path in hidden.paths if hidden else ():
        bad = bad_state(watch.model.get_submodule(path), path, untouched, state.masks)
        origin = f"{hidden.why if hidden else ''}: which module was the first to use it is not known."
        if bad is not None and (told := [*bad_before(watch, state, bad, origin, here)]):
            yield from told
            return
    value = loss.item() if loss.numel() == 1 else math.nan
    masks, diverging = context.mask_names(watch), context.diverging
    yield loss_outside(watch, value, loss, stats, masks, here, diverging=diverging, why=hidden.why if hidden else None)


def hidden_from(watch: Watch, *, late: bool = False) -> Hidden | None:
    """What was not seen of the model before this backward; None where its own output was, or those of all its parts.

    Of a model that is called itself, the output is what counts: what went wrong inside shows in it. `late`: the
    backward is over, and whether a forward was missed before it is not known any more.
    """
    tap = watch.tap
    compiled = [path for path in tap.inside_compiled if path not in tap.names] + tap.compiled_later
    ignored = [tap.names[index] for index in sorted(tap.ignored)]
    if not tap.watching:
        return Hidden([""], "Module outputs are not watched, as asked")
    if "" in compiled:
        return Hidden([""], "What goes on inside of the model is not seen, since it is compiled in place")
    if "" in ignored:
        return Hidden([""], "The model's output is not watched, as asked")
    # A second backward may go through a forward that was seen before the first.
    if not (late or watch.forwards or watch.since_step) and (tap.calls or not tap.order):
        return Hidden([""], "No call of the model was seen before this backward")
    if not tap.calls and (paths := compiled + ignored):
        return Hidden(paths, f"What goes on inside of {listed(paths)} is not seen")
    return None
