"""What FiniteGuard tests just before a step applies it: the gradients as they are then, weights bad from the start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gpt_guard.callbacks.finite.finite_gradients import bad_now, changed_before_step
from gpt_guard.callbacks.finite.finite_state import bad_at_step
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.state import StateWatch
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation


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
