"""GradNormMonitor: gradients that are zero, missing, exploding, vanishing, uneven over depth, or always clipped."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.clipping import Clipping
from gpt_guard.callbacks.depth import DepthProfile
from gpt_guard.callbacks.history import RobustHistory, Standing, quantile
from gpt_guard.callbacks.missing_gradients import MissingGradients
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity
from gpt_guard.render import number

_IN_A_ROW = 3
_REFERENCE = 20


class GradNormMonitor(Guard):
    """Judges the gradient norm of each step, unclipped and unscaled, against the run's own history.

    `warn_above` is an absolute limit (off by default). `spike_factor` is how many times the median of the last `window`
    usual norms is a spike, `vanish_factor` how small a part of it is vanished when it lasts for `vanish_steps` steps
    and the loss has not fallen; both only beyond `sigmas` robust standard deviations and after `least` norms. A new
    level that lasts `adopt_after` steps becomes the history. `missing_after` and `conditional_after` are the steps
    without a gradient after which a parameter is reported, the second for a module left out of the calls while others
    of its ModuleList or ModuleDict ran. `depth_limit` bounds the ratio of the gradient per weight in the first and the
    last block, over the first `depth_steps` steps. Clipping is reported if `clip_share` of the last `clip_window`
    steps were clipped by a factor of `clip_ratio` or more.

    `spike_factor` 10 and `clip_ratio` 2 follow Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent
    neural networks" (ICML 2013): thresholds from half to ten times the average norm of a run still converge. The
    falling-off over depth is that of Glorot & Bengio, "Understanding the difficulty of training deep feedforward
    neural networks" (AISTATS 2010); its limit of 1e-4 leaves their networks, which do train, far inside.

    Reads nothing from the device itself. Raises GuardUsageError for a limit that cannot work.
    """

    def __init__(
        self,
        *,
        warn_above: float | None = None,
        spike_factor: float = 10.0,
        vanish_factor: float = 1e-3,
        vanish_steps: int = 10,
        sigmas: float = 6.0,
        window: int = 100,
        least: int = 20,
        adopt_after: int = 20,
        missing_after: int = 3,
        conditional_after: int = 50,
        depth_limit: float = 1e-4,
        depth_steps: int = 5,
        clip_window: int = 50,
        clip_share: float = 0.9,
        clip_ratio: float = 2.0,
    ) -> None:
        _check(warn_above is None or warn_above > 0.0, "warn_above", warn_above, "a norm above 0, or None")
        _check(spike_factor > 1.0, "spike_factor", spike_factor, "a factor above 1")
        _check(0.0 <= vanish_factor < 1.0, "vanish_factor", vanish_factor, "a factor from 0 (off) to below 1")
        _check(1 <= vanish_steps <= adopt_after, "vanish_steps", vanish_steps, f"1 to adopt_after ({adopt_after})")
        _check(1 <= missing_after < conditional_after, "missing_after", missing_after, "1 to below conditional_after")
        _check(0.0 <= depth_limit < 1.0, "depth_limit", depth_limit, "a ratio from 0 (off) to below 1")
        _check(depth_steps >= 1, "depth_steps", depth_steps, "at least 1")
        _check(clip_window >= 10, "clip_window", clip_window, "at least 10 steps")
        _check(0.0 < clip_share <= 1.0, "clip_share", clip_share, "a share above 0, up to 1")
        _check(clip_ratio > 1.0, "clip_ratio", clip_ratio, "a factor above 1")
        self._warn_above = math.inf if warn_above is None else warn_above
        self._spike, self._vanish, self._vanish_steps = spike_factor, vanish_factor, vanish_steps
        self._history = {"window": window, "least": least, "sigmas": sigmas, "adopt_after": adopt_after}
        self._missing_after = {"first": missing_after, "patience": conditional_after}
        self._depth_limits = {"limit": depth_limit, "steps": depth_steps}
        self._clip = {"window": clip_window, "share": clip_share, "ratio": clip_ratio}
        self._new_track()
        self._tracks: dict[int, _Track] = {}
        self._optimizers: list[weakref.ref[Any]] | None = None
        self._missing: MissingGradients | None = None
        self._depth: DepthProfile | None = None
        self._backwards = 0

    def _new_track(self) -> _Track:
        return _Track(RobustHistory(**self._history), Clipping(**self._clip), _REFERENCE + self._history["adopt_after"])

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        before, self._optimizers = self._optimizers, [weakref.ref(optimizer) for optimizer in watch.optimizers]
        if before is not None and [ref() for ref in before] != list(watch.optimizers):
            self._tracks.clear()
        self._missing = MissingGradients(watch, **self._missing_after)
        self._depth = DepthProfile(watch, **self._depth_limits) if self._depth_limits["limit"] else None

    def detach(self) -> None:
        if self._missing is not None:
            self._missing.close()
        self._missing = self._depth = None
        super().detach()

    def after_backward(self) -> None:
        self._backwards += 1

    def judge(self, seen: Observation) -> Iterator[Finding]:
        if seen.skipped or seen.evaluation:
            return
        track = self._tracks.get(seen.optimizer)
        if track is None:
            track = self._tracks[seen.optimizer] = self._new_track()
        backwards, track.backwards = self._backwards - track.backwards, self._backwards
        norm = seen.grad_norm
        if not norm or not seen.grad_norm_clipped:
            yield from self._judge_nothing(track, seen, backwards)
        else:
            track.zeros = track.empty = 0
        if self._missing is not None:
            yield from self._missing.judge(seen)
        if norm is None or not norm < math.inf:
            return
        if norm > self._warn_above:
            yield self._above(seen, norm)
        track.losses.append(seen.loss)
        standing = track.history.take(norm, high=self._spike, low=self._vanish)
        if standing is not None and standing.side != "usual":
            yield from self._off_level(track, seen, norm, standing)
        if self._depth is not None:
            yield from self._depth.judge(seen)
        yield from track.clipping.judge(seen)

    def _judge_nothing(self, track: _Track, seen: Observation, backwards: int) -> Iterator[Finding]:
        """The step is about to apply nothing: no gradient at all, one cleared after backward, or one of exact zeros."""
        track.nothing(cleared=bool(backwards and seen.grad_norm), zero=seen.grad_norm == 0.0)
        if track.zeros and (track.zeros == _IN_A_ROW or (seen.loss or 0.0) != 0.0):
            yield self._zero(track, seen)
        elif track.empty == _IN_A_ROW and any(p.requires_grad for p in self.watch.held_by(seen.optimizer).values()):
            yield self._empty(seen, backwards)

    def _zero(self, track: _Track, seen: Observation) -> Finding:
        often = f" for {track.zeros} steps in a row" if track.zeros > 1 else ""
        return finding(
            "GG201",
            f"The gradient norm is exactly 0 over {len(seen.grad_norms)} parameters{often}, at loss {number(seen.loss)}.",
            likely=["constant_loss"] if seen.loss else ["loss_zero"],
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}",
            evidence={"loss": seen.loss, "in_a_row": track.zeros, "lr": list(seen.lr)},
        )

    def _empty(self, seen: Observation, backwards: int) -> Finding:
        held = self.watch.held_by(seen.optimizer)
        cleared = bool(backwards and seen.grad_norm)
        if cleared:
            how = f"backward() left a gradient norm of {number(seen.grad_norm)}, and it was gone before the step"
        elif backwards:
            how = f"{backwards} backward calls reached the model since the last step, but none of these parameters"
        else:
            how = "no backward() reached the model since the last step"
        return finding(
            "GG208",
            f"optimizer.step() had no gradient to apply for any of its {len(held)} parameters in {_IN_A_ROW} steps in a "
            f"row: {how}.",
            likely=["cleared"] if cleared else ["other_tensors"] if backwards else ["other_model"],
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}",
            evidence={"backward_calls": backwards, "norm_after_backward": seen.grad_norm if cleared else None},
        )

    def _above(self, seen: Observation, norm: float) -> Finding:
        return finding(
            "GG207",
            f"The gradient norm is {number(norm)}, above the limit warn_above={number(self._warn_above)}. "
            f"{_largest(seen)}",
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}",
            evidence={"grad_norm": norm, "warn_above": self._warn_above, "largest": dict(seen.largest_grads())},
        )

    def _off_level(self, track: _Track, seen: Observation, norm: float, standing: Standing) -> Iterator[Finding]:
        if standing.side == "high":
            yield self._high(seen, norm, standing)
        elif standing.streak >= self._vanish_steps and track.loss_not_fallen(standing.streak):
            yield self._low(track, seen, norm, standing)

    def _high(self, seen: Observation, norm: float, standing: Standing) -> Finding:
        applied = seen.grad_norm_clipped
        contained = bool(seen.clipped) and applied is not None and applied < self._spike * standing.median
        then = f" Clipping applied {number(applied)} of it." if seen.clipped else ""
        if standing.adopted:
            then += f" It has been so for {standing.streak} steps: this level is the usual one from now on."
        return finding(
            "GG203",
            f"The gradient norm is {number(norm)}, {number(standing.factor)} times the usual {number(standing.median)} "
            f"({_sigmas(standing)}), at loss {number(seen.loss)}.{then} {_largest(seen)}",
            likely=["new_level"] if standing.adopted else ["odd_batch"] if contained else ["lr_too_high"],
            severity=Severity.INFO if contained or standing.adopted else Severity.WARNING,
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}{_kind(contained, standing)}",
            evidence=_figures(norm, standing) | {"applied": applied, "largest": dict(seen.largest_grads())},
        )

    def _low(self, track: _Track, seen: Observation, norm: float, standing: Standing) -> Finding:
        return finding(
            "GG204",
            f"The gradient norm is {number(norm)}, {number(standing.factor)} times the usual {number(standing.median)} "
            f"({_sigmas(standing)}), for {standing.streak} steps in a row, and the loss has not fallen with it: "
            f"{number(track.losses[-standing.streak - 1])} before, {number(seen.loss)} now.",
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            cause_id=f"optimizer {seen.optimizer}",
            evidence=_figures(norm, standing) | {"in_a_row": standing.streak},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"tracks": {str(index): track.state_dict() for index, track in self._tracks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracks.clear()
        self._optimizers = None
        for index, saved in state["tracks"].items():
            self._tracks[int(index)] = track = self._new_track()
            track.load_state_dict(saved)
