"""From who is to blame for a bad forward to what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.finite.blame import Blame, Shown
from gpt_guard.callbacks.finite.finite_context import Context
from gpt_guard.callbacks.finite.finite_loss import is_loss, loss_of_module
from gpt_guard.callbacks.finite.finite_state import bad_before
from gpt_guard.callbacks.finite.finite_words import bad_from_outside, bad_output, module_name
from gpt_guard.hooks.autograd_graph.explain import explain
from gpt_guard.hooks.autograd_graph.half import no_half
from gpt_guard.hooks.state import StateWatch
from gpt_guard.hooks.sums import measure
from gpt_guard.hooks.tensors import looks_bad, walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding


def bad_batch(watch: Watch) -> Blame | None:
    """The first bad tensor that the model was just called with; one sum for each, exact only after that."""
    if watch.tap.inputs is None:
        return None
    args, kwargs = watch.tap.inputs
    # Ids alone have nothing to test.
    if not kwargs and all(type(each) is Tensor and each.dtype is torch.int64 for each in args):
        return None
    for position, tensor in walk({**dict(enumerate(args)), **kwargs}):
        number = measure(watch.tap, 0, tensor)
        if number - number != 0.0 and (stats := looks_bad(tensor)) is not None:
            return Blame(None, Shown.read(position, stats), 0)
    return None


def verdict(
    watch: Watch, state: StateWatch, context: Context, culprit: Blame, tensor: Tensor | None, here: dict[str, Any]
) -> Iterator[Finding]:
    """What is said of a bad forward; nothing of state that has been spoken of already.

    `tensor` is the bad one, None where it is no longer at hand.
    """
    masks, diverging = context.mask_names(watch), context.diverging
    if culprit.state is not None:
        assert culprit.maker is not None
        origin = f"{module_name(watch, culprit.maker)} was the first to use it."
        yield from bad_before(watch, state, culprit.state, origin, here)
    elif culprit.maker is None:
        yield bad_from_outside(watch, culprit, here)
    elif is_loss(watch, culprit):
        yield loss_of_module(watch, culprit, tensor, masks, here, diverging=diverging)
    else:
        operation = explain(tensor) if tensor is not None else None
        half = not no_half(watch, tensor)
        yield bad_output(watch, culprit, here, operation=operation, diverging=diverging, half=half)
