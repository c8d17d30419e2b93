"""From where a bad value was first seen to what is said of it, in the forward and at the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.finite.context import Context
from gpt_guard.callbacks.finite.first_seen import FirstSeen, Shown
from gpt_guard.callbacks.finite.forward_findings import bad_from_outside, bad_output, module_name
from gpt_guard.callbacks.finite.gradient_findings import bad_now, changed_before_step
from gpt_guard.callbacks.finite.loss_findings import is_loss, loss_of_module
from gpt_guard.callbacks.finite.state_findings import bad_at_step, bad_before
from gpt_guard.hooks.autograd_graph.explain import explain, no_half
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.output_hooks import measure
from gpt_guard.hooks.tensors import looks_bad, walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.hooks.weights import StateWatch
from gpt_guard.records import Finding, Moment, Observation


def bad_batch(watch: Watch) -> FirstSeen | None:
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
            return FirstSeen(None, Shown.read(position, stats), 0)
    return None


def verdict(
    watch: Watch, state: StateWatch, context: Context, culprit: FirstSeen, tensor: Tensor | None, here: dict[str, Any]
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


class AtStep:
    """Judges the observation of a step that is about to be made; reads tensors only where its norms are bad.

    `bad` tells, once judged, that the step will spoil its parameters, whether or not this had to be told again.
    """

    def __init__(self) -> None:
        self.bad = False
        self._settled = False

    def judge(self, watch: Watch, state: StateWatch, seen: Observation, *, gradients: bool) -> Iterator[Finding]:
        """Parameters that have been bad since the start, then gradients that code has changed since backward()."""
        self.bad = False
        if not self._settled:
            self._settled = True
            yield from self._never_good(watch, state)
        elif state.told:
            state.recover()
        norm = seen.grad_norm_clipped
        if gradients and not self.bad and norm is not None and norm - norm != 0.0:
            yield from self._changed(watch, seen)

    def _never_good(self, watch: Watch, state: StateWatch) -> Iterator[Finding]:
        """What was bad at the start and has not been loaded since. Only what has a gradient is in use."""
        for name, stats in state.settled_late().items():
            if name not in state.told and watch.parameters[name].grad is not None:
                state.ignore(name)
                if not self.bad:
                    self.bad = True
                    yield bad_at_step(watch, name, stats, _here(watch))

    def _changed(self, watch: Watch, seen: Observation) -> Iterator[Finding]:
        """Squares of finite gradients may overflow, so those are read before anything is said."""
        bad = bad_now(watch.held_by(seen.optimizer))
        self.bad = bool(bad)
        if bad and watch.grad_norms is None:
            # `torch.autograd.grad`, torch.func and hand-written gradients come without a backward().
            yield changed_before_step(watch, bad, _here(watch), scaled=False, seen=False)
            return
        fresh = {name: stats for name, stats in bad.items() if math.isfinite(seen.grad_norms.get(name) or 0.0)}
        if fresh or (bad and watch.scaling):
            # Bad already after backward() and not scaled: that was told then.
            yield changed_before_step(watch, fresh or bad, _here(watch), scaled=not fresh)


def _here(watch: Watch) -> dict[str, Any]:
    where = user_line() if watch.immediate else None
    return {"step": watch.step, "moment": Moment.BEFORE_STEP, "where": where}
