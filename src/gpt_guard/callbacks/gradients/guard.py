"""GradNormMonitor: gradients that are zero, missing, lost, exploding, overflowing, vanishing, uneven, clipped."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.gradients import findings
from gpt_guard.callbacks.gradients.clipping import Clipping, Scaling
from gpt_guard.callbacks.gradients.depth import DepthProfile
from gpt_guard.callbacks.gradients.level import RobustHistory, Standing, quantile
from gpt_guard.callbacks.gradients.lost import LostGradients
from gpt_guard.callbacks.gradients.missing import MissingGradients
from gpt_guard.callbacks.settings import check_types
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.autograd_graph.nodes import leaves
from gpt_guard.hooks.gradients import exact_norm
from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

if TYPE_CHECKING:
    from torch import Tensor

_IN_A_ROW = 3
# One step on uncleared gradients may be a slip at a boundary; a second in a row is how the loop works.
_UNCLEARED = 2
_FROM_THE_START = 50
# A norm below has squares that float32 can hold, and does not overflow.
_SQUARES_FIT = math.sqrt(torch.finfo(torch.float32).max)
_REFERENCE = 20
_RECENT = 10
_GONE = 0.05
_LOSS_JUMP = 3.0
_CLIMBING = 2.0
# High norms in a row that are a state and not chance: where one step in twenty is high, three follow one another by
# chance once in 400 spikes. A run whose spikes have gone back before is given up to twice as many.
_LASTS = 3


class GradNormMonitor(Guard):
    """Judges the gradient norm of each step, unclipped and unscaled, against the run's own history.

    `warn_above` is an absolute limit (off by default). `spike_factor` is how many times the median of the last `window`
    usual norms is a spike, `vanish_factor` how small a part of it is vanished when it lasts for `vanish_steps` steps
    and the loss has not fallen; both only beyond `sigmas` robust standard deviations and after `least` norms. A new
    level that lasts `adopt_after` steps becomes the history. `missing_after` and `conditional_after` are the steps
    without a gradient after which a parameter is reported, the second for a module left out of the calls while others
    of its ModuleList or ModuleDict ran. `depth_limit` bounds the ratio of the gradient per weight in the first and the
    last block, in the median of the first `depth_steps` steps. Clipping is reported if `clip_share` of the last
    `clip_window` steps were clipped, by a factor of `clip_ratio` in the median, to one and the same norm.

    `spike_factor` 10 and `clip_ratio` 2 follow Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent
    neural networks" (ICML 2013): thresholds from half to ten times the average norm of a run still converge. The
    falling-off over depth is the picture of Glorot & Bengio, "Understanding the difficulty of training deep feedforward
    neural networks" (AISTATS 2010); the limit of 1e-4 is far beyond what their networks, which do train, show.

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
        check_types(GradNormMonitor, locals())
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
        self._window, self._least, self._sigmas, self._adopt_after = window, least, sigmas, adopt_after
        self._missing_after, self._conditional_after = missing_after, conditional_after
        self._depth_limit, self._depth_steps = depth_limit, depth_steps
        self._clip_window, self._clip_share, self._clip_ratio = clip_window, clip_share, clip_ratio
        self._new_track()  # raises now, not in the middle of a run, for a history that cannot work
        self._tracks: dict[int, _Track] = {}
        self._optimizers: list[weakref.ref[Any]] | None = None
        self._missing: MissingGradients | None = None
        self._lost: LostGradients | None = None
        self._depth: DepthProfile | None = None
        self._backwards = 0
        self._graphless = False
        self._cut_at: tuple[int, ...] | None = None
        self._overflowing: dict[str, float] = {}
        self._zero_ends: dict[int, tuple[Observation, int]] = {}

    def _new_track(self) -> _Track:
        history = RobustHistory(
            window=self._window, least=self._least, sigmas=self._sigmas, adopt_after=self._adopt_after
        )
        clipping = Clipping(window=self._clip_window, share=self._clip_share, ratio=self._clip_ratio)
        return _Track(history, clipping, longest_streak=self._adopt_after)

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        before, self._optimizers = self._optimizers, [weakref.ref(optimizer) for optimizer in watch.optimizers]
        if before is not None and [ref() for ref in before] != list(watch.optimizers):
            # Another run: its usual level is not known yet.
            self._tracks.clear()
        self._missing = MissingGradients(watch, first=self._missing_after, patience=self._conditional_after)
        self._missing.open()
        self._lost = LostGradients(watch, patience=self._conditional_after)
        self._depth = DepthProfile(watch, limit=self._depth_limit, steps=self._depth_steps)

    def detach(self) -> None:
        for each in (self._missing, self._lost):
            if each is not None:
                each.close()
        self._missing = self._lost = self._depth = None
        self._overflowing = {}
        super().detach()

    def before_backward(self, loss: Tensor) -> None:
        # Two attributes of the tensor: nothing is read. A leaf has no graph.
        if loss.is_leaf and loss.requires_grad and self._ours(loss):
            self._graphless = True
            self.watch.submit(findings.no_graph(str(tuple(loss.shape)), self.watch.step))
        elif any(track.empty for track in self._tracks.values()):
            # Only while steps have nothing to apply: a walk over the graph.
            self._cut_at = self._cut(loss)
        if self._lost is not None:
            self._lost.before_backward(loss)

    def _cut(self, loss: Tensor) -> tuple[int, ...] | None:
        """The shape of a tensor in which the graph of a loss ends that depends on no parameter of the model."""
        if not self._ours(loss) or self.watch.reaches(loss):
            return None
        ends = (leaf for leaf in leaves(loss) if not isinstance(leaf, nn.Parameter))
        return next((tuple(leaf.shape) for leaf in ends), None)

    def _ours(self, loss: Tensor) -> bool:
        """Whether a loss without a graph was meant for this model: the model ran, could learn, and is stepped."""
        watch = self.watch
        trainable = any(parameter.requires_grad for parameter in watch.parameters.values())
        return bool(watch.tap.calls and watch.optimizers and trainable and watch.name_of(loss) is None)

    def after_backward(self) -> None:
        self._backwards += 1
        measured = self.watch.grad_norms
        # Before clipping: dividing by an infinite norm makes every gradient zero.
        if self.watch.immediate and not self.watch.scaling and measured is not None and math.inf in measured.norms:
            self._overflowing = self._exact(dict(zip(measured.names, measured.norms, strict=True)))

    def _exact(self, norms: Mapping[str, float | None]) -> dict[str, float]:
        """The exact norms of the gradients whose norm is inf, if all elements are finite. Reads the device."""
        exact: dict[str, float] = {}
        for name in [name for name, norm in norms.items() if norm == math.inf]:
            grad = self.watch.tracked[name].grad
            if grad is None or describe(grad) is not None:
                return {}
            exact[name] = exact_norm(grad)
        return exact

    def judge(self, seen: Observation) -> Iterator[Finding]:
        if seen.skipped or seen.evaluation:
            return
        track = self._tracks.get(seen.optimizer)
        if track is None:
            track = self._tracks[seen.optimizer] = self._new_track()
        # Zeros that were not cleared are no harm: a zero_grad() in the wrong place is told below. What the version
        # counters suspect must have been there: gradients cleared through .data look uncleared to them.
        uncleared = seen.readings.get("grads_uncleared", 0)
        if uncleared >= _UNCLEARED and seen.readings.get("grads_left") and seen.grad_norm_clipped:
            yield findings.uncleared(seen, uncleared)
        yield from track.scaling.judge(seen)
        backwards, track.backwards = self._backwards - track.backwards, self._backwards
        if self._missing is not None and not self._missing.settled(seen.optimizer):
            yield from self._missing.judge(seen)
        if self._lost is not None:
            yield from self._lost.judge(seen)
        norm = seen.grad_norm
        if norm == math.inf:
            yield from self._judge_overflow(track, seen)
        if not norm or not seen.grad_norm_clipped or (not backwards and self._without_gradients(seen.optimizer)):
            yield from self._judge_nothing(track, seen, backwards)
            return
        track.zeros = track.empty = 0
        self._zero_ends.clear()
        # Non-finite norms must not enter a history.
        if norm < math.inf:
            track.overflows = False
            yield from self._judge_level(track, seen, norm)
            if self._depth is not None:
                yield from self._depth.judge(seen)
                if self._depth.finished:
                    self._depth = None
            if not track.scaling.reported:
                yield from track.clipping.judge(seen)

    def _judge_overflow(self, track: _Track, seen: Observation) -> Iterator[Finding]:
        """A norm of inf over finite elements; gradients that are not finite themselves belong to FiniteGuard."""
        exact, self._overflowing = self._overflowing, {}
        if self._watch is not None and not self.watch.immediate:
            exact = self._exact(seen.grad_norms)
            if any(0.0 < norm < _SQUARES_FIT for norm in exact.values()):
                # It was the GradScaler's scale that made them so large, or something has cut them down since.
                return
        if exact and not track.overflows and (not seen.grad_norm_clipped or self._keeps_squares(seen.optimizer)):
            track.overflows = True
            yield findings.overflowing(seen, exact)

    def _keeps_squares(self, index: int) -> bool:
        """Whether this optimizer averages or sums squared gradients, by the settings that go with that.

        Plain SGD uses a gradient as it is: without clipping, nothing follows from a norm that overflows.
        """
        groups = [] if self._watch is None else self.watch.optimizers[index].param_groups
        return any(key in group for group in groups for key in ("betas", "alpha", "lr_decay", "rho", "beta2_decay"))

    def _without_gradients(self, index: int) -> bool:
        """Whether nothing is there to apply, whatever was measured after an earlier backward; reads no values."""
        return self._watch is not None and all(p.grad is None for p in self.watch.held_by(index).values())

    def _judge_nothing(self, track: _Track, seen: Observation, backwards: int) -> Iterator[Finding]:
        # LoopOrder names the clipping limit that takes every gradient away.
        track.clipped_away = track.clipped_away or "clipped_away" in seen.readings
        if track.clipped_away:
            return
        track.count_nothing(seen)
        # Easy triplets and rewards that have not come yet make losses of 0 in the first steps.
        patience = _IN_A_ROW if track.trained else _FROM_THE_START
        if track.zeros and (track.zeros == patience or seen.loss):
            self._zero_ends.pop(seen.optimizer, None)
            dwindled = bool(track.losses) and track.memorised(track.losses[-1])
            yield findings.zero_norm(seen, track.zeros, trained=track.trained, dwindled=dwindled)
        elif track.zeros and track.zeros < patience and not track.trained:
            self._zero_ends[seen.optimizer] = (seen, track.zeros)
        elif track.empty == _IN_A_ROW and not self._graphless:
            held = sum(parameter.requires_grad for parameter in self.watch.held_by(seen.optimizer).values())
            if held:
                yield findings.nothing_to_apply(seen, track.empty, held, backwards, self._cut_at)

    def _judge_level(self, track: _Track, seen: Observation, norm: float) -> Iterator[Finding]:
        if norm > self._warn_above:
            yield findings.above_limit(seen, self._warn_above)
        track.take_loss(seen.loss)
        standing: Standing | None = track.history.take(norm, high=self._spike, low=self._vanish)
        if standing is None:
            return
        sudden = standing.factor >= 2.0 and track.sudden(standing.factor)
        # One spike that goes back is how many healthy runs look. What stays, or leaves a worse loss behind, is not.
        spiked, track.spiked = track.spiked, None
        if spiked is not None and track.loss_leapt():
            yield findings.too_high(*spiked, self._spike, lasts=True, loss_after=seen.loss)
        if standing.side == "usual":
            track.factor = standing.factor
            track.went_back += spiked is not None
        elif standing.side == "high":
            kind = "memorised" if track.memorised(seen.loss) else "sudden" if sudden else "spike"
            track.spiked = (seen, standing, kind)
            lasts = standing.streak >= _LASTS + min(track.went_back, _LASTS)
            yield findings.too_high(seen, standing, kind, self._spike, lasts=lasts)
        elif standing.streak >= self._vanish_steps and track.loss_stalled(standing.streak):
            yield findings.too_low(seen, standing, track.loss_before(standing.streak))

    def blind_spots(self) -> Iterable[str]:
        if self.watch.sharded and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            yield "the whole gradient norm: parameters are sharded, and norms and ratios are those of this rank's part"

    def finish(self) -> Iterator[Finding]:
        """Tell what a short run left no time for."""
        if self._missing is not None:
            yield from self._missing.finish()
        for seen, zeros in self._zero_ends.values():
            if zeros >= _IN_A_ROW:
                yield findings.zero_norm(seen, zeros, trained=False)

    def state_dict(self) -> dict[str, Any]:
        return {"tracks": {str(index): track.state_dict() for index, track in self._tracks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracks.clear()
        self._optimizers = None
        for index, saved in state["tracks"].items():
            track = self._tracks[int(index)] = self._new_track()
            track.backwards = self._backwards
            track.load_state_dict(saved)


class _Track:
    """Bounded memory of one optimizer: usual norms, losses, clipping, steps with nothing to apply.

    `zeros` and `empty` count steps in a row, `backwards` calls seen before; `factor` is that of the newest norm.
    """

    def __init__(self, history: RobustHistory, clipping: Clipping, *, longest_streak: int) -> None:
        self.history = history
        self.clipping = clipping
        self.scaling = Scaling()
        self.losses: deque[float | None] = deque(maxlen=_REFERENCE + longest_streak)
        self.first_loss: float | None = None
        self.zeros = 0
        self.empty = 0
        self.backwards = 0
        self.clipped_away = self.overflows = False
        self.factor = 1.0
        # The step before, where it was the first high one.
        self.spiked: tuple[Observation, Standing, str] | None = None
        self.went_back = 0

    @property
    def trained(self) -> bool:
        """Whether there was a loss other than 0 that had a gradient."""
        return bool(self.first_loss) or any(self.losses)

    def sudden(self, factor: float) -> bool:
        """Whether norm and loss jumped in this one step, out of a calm level; `factor` is that of the norm now.

        Too large a learning rate makes both climb from step to step; one odd batch does not announce itself.
        """
        before, self.factor = self.factor, factor
        known = [loss for loss in list(self.losses)[-_RECENT:] if loss is not None]
        if before >= _CLIMBING or len(known) < _RECENT or known[-2] > _CLIMBING * quantile(known[:-1], 0.5):
            return False
        return known[-1] > _LOSS_JUMP * max(known[:-1]) > 0.0

    def loss_leapt(self) -> bool:
        """Whether the newest loss is far above those before the step that precedes it."""
        known = [loss for loss in list(self.losses)[-_RECENT - 2 :] if loss is not None]
        return len(known) > 2 and known[-1] > _LOSS_JUMP * max(known[:-2]) > 0.0

    def take_loss(self, loss: float | None) -> None:
        """Note the loss of a step whose norm is finite."""
        self.losses.append(loss)
        if self.first_loss is None:
            self.first_loss = loss

    def memorised(self, loss: float | None) -> bool:
        """Whether the loss is nearly gone against the first one: norms are tiny and jumpy there, and do no harm."""
        return loss is not None and self.first_loss is not None and 0.0 <= loss < _GONE * self.first_loss

    def count_nothing(self, seen: Observation) -> None:
        """Note a step that has nothing to apply: a gradient of exact zeros, or none."""
        if seen.grad_norm == 0.0:
            self.zeros, self.empty = self.zeros + 1, 0
        else:
            self.zeros, self.empty = 0, self.empty + 1

    def loss_before(self, streak: int) -> float | None:
        """The last loss before the last `streak` steps."""
        return self.losses[-streak - 1] if len(self.losses) > streak else None

    def loss_stalled(self, streak: int) -> bool:
        """Whether the loss of the last steps is no better than before them; False where losses are not known.

        A run that has converged has its lowest losses now. One whose gradient was lost does not: its loss jumps to a
        worse level, or varies from batch to batch as it did before.
        """
        known = [loss for loss in self.losses if loss is not None]
        if len(known) < len(self.losses) or len(known) < streak + _REFERENCE:
            return False
        before = known[-streak - _REFERENCE : -streak]
        return quantile(known[-min(streak, _RECENT) :], 0.5) > quantile(before, 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "clipping": self.clipping.state_dict(),
            "losses": list(self.losses),
            "first_loss": self.first_loss,
            "zeros": self.zeros,
            "empty": self.empty,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self.clipping.load_state_dict(state["clipping"])
        self.losses.clear()
        self.losses.extend(state["losses"])
        self.first_loss = state["first_loss"]
        self.zeros, self.empty = int(state["zeros"]), int(state["empty"])


def _check(holds: bool, name: str, given: object, expected: str) -> None:
    if not holds:
        raise GuardUsageError(f"GradNormMonitor({name}={given!r}) cannot work: expected {expected}")
