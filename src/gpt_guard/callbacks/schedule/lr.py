"""LRTracker: the learning rate of each group at the moment of each step, and whether a schedule could mean it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.gradients.level import RobustHistory
from gpt_guard.callbacks.schedule import lr_findings
from gpt_guard.callbacks.schedule.expected_lr import Expected, ExpectedLR
from gpt_guard.callbacks.schedule.lr_track import LRTrack
from gpt_guard.callbacks.schedule.schedulers import (
    SchedulerView,
    doubled,
    find_schedulers,
    is_scheduled,
    last_lr,
    state_of,
    views,
)
from gpt_guard.callbacks.settings import check_types
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

_SCHEDULE = "lr_tracker.schedule"
_FAST_IN_A_ROW = 3
# What is sure to be a restart needs no leap to be told: a cosine falls by a tenth in a fifth of its length.
_RESTARTED = 1.1
_MOVED_ON = 3


class LRTracker(Guard):
    """Judges the learning rate as the optimizer uses it, beside the scheduler and the gradient norm.

    `expected` is the schedule you mean: a function of the step number, or a list with an entry for each step; each
    gives one lr or one for each group, compared within `rtol`. lr 0 is reported after `zero_steps` steps in a row: a
    warm-up from 0 and a cosine to 0 have one each. A scheduler that never moved is reported at the end of a run of at
    least `unstepped_after` steps. An lr that stays below `vanishing` times its own peak is reported: with Adam a weight
    moves by about lr in a step, and a millionth of a usual peak (1e-3) is below the spacing of float32 numbers at 0.02,
    the usual size of a weight. So is a scheduler that is past its own end by a tenth. `jump_factor` bounds the change
    of the lr over a resume; a tenth is enough where a new scheduler puts it back to that of the first step. A gradient
    norm of `spike_factor` times the median of the last `window` usual ones, beyond `sigmas` robust standard deviations
    and after `least` of them, is a spike; here it counts only at the schedule's peak. Both figures are those of
    GradNormMonitor, and so is their source.

    Schedulers are those given to Guardian. Where none was given and the optimizer bears the mark that torch's
    schedulers leave on it, they are looked for once among the live objects of the process, at the first step.

    Reads nothing from the device itself. Raises GuardUsageError for an argument that cannot work.
    """

    light: ClassVar[frozenset[str]] = frozenset({"before_step"})
    late = True

    def __init__(
        self,
        expected: Expected | None = None,
        *,
        rtol: float = 1e-6,
        zero_steps: int = 3,
        unstepped_after: int = 20,
        vanishing: float = 1e-6,
        jump_factor: float = 2.0,
        spike_factor: float = 10.0,
        window: int = 100,
        least: int = 20,
        sigmas: float = 6.0,
    ) -> None:
        check_types(LRTracker, locals())
        _check(rtol >= 0.0, "rtol", rtol, "0 or more")
        _check(zero_steps >= 2, "zero_steps", zero_steps, "at least 2: a warm-up from 0 has one step at 0")
        _check(unstepped_after >= 2, "unstepped_after", unstepped_after, "at least 2 steps")
        _check(0.0 <= vanishing < 1.0, "vanishing", vanishing, "a share of the peak below 1; 0 switches it off")
        _check(jump_factor > 1.0, "jump_factor", jump_factor, "a factor above 1")
        _check(spike_factor > 1.0, "spike_factor", spike_factor, "a factor above 1")
        self._expected = None if expected is None else ExpectedLR(expected, rtol=rtol)
        self._zero_steps, self._unstepped_after = zero_steps, unstepped_after
        self._vanishing = vanishing
        self._jump, self._spike = jump_factor, spike_factor
        self._window, self._least, self._sigmas = window, least, sigmas
        self._new_track()  # raises now, not in the middle of a run, for a history that cannot work
        self._tracks: dict[int, LRTrack] = {}
        self._optimizers: list[weakref.ref[Any]] | None = None
        self._views: list[SchedulerView] = []
        self._looked = False

    def _new_track(self) -> LRTrack:
        return LRTrack(RobustHistory(window=self._window, least=self._least, sigmas=self._sigmas))

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        before, self._optimizers = self._optimizers, [weakref.ref(optimizer) for optimizer in watch.optimizers]
        if before is not None and [ref() for ref in before] != list(watch.optimizers):
            # Other optimizers are another run, and no resume.
            self._tracks.clear()
        for track in self._tracks.values():
            track.begin()
        self._views = views(watch.scheduler, watch.optimizers)
        self._looked = False

    def detach(self) -> None:
        self._views = []
        super().detach()

    def before_step(self, optimizer: Optimizer) -> None:
        """Where a scheduler stands can only be asked at its step; a light one is judged later."""
        if self._views and not self.watch.pace.full:
            self.watch.ledger.put(_SCHEDULE, [state_of(view.get()) for view in self._views])

    def judge(self, seen: Observation) -> Iterable[Finding]:
        lr = seen.lr
        if seen.evaluation or not lr:
            return ()
        track = self._tracks.get(seen.optimizer)
        if track is None:
            track = self._tracks[seen.optimizer] = self._new_track()
        if seen.skipped:
            track.skipped += 1
            return ()
        # Without a scheduler, most of what `_judge` looks at is not there.
        alone = self._looked and not self._views and self._expected is None and not track.resumed
        if not alone or not track.take_usual(seen.step, lr):
            return self._judge(track, seen)
        found = self._judge_norm(track, seen)
        return (lr_findings.vanished(seen, track, []), *found) if track.has_vanished(lr, self._vanishing) else found

    def _judge(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        if not self._looked:
            yield from self._look_for_schedulers()
        yield from self._judge_values(track, seen)
        yield from self._judge_schedulers(track, seen)
        expected = None
        if self._expected is not None and not track.off_schedule:
            expected = self._expected.at(seen.step, len(seen.lr))
            if expected is not None and not self._expected.matches(seen.lr, expected):
                track.off_schedule = True
                yield lr_findings.off_schedule(seen, expected, self._expected.shift(seen.step, seen.lr))
        if track.resumed:
            track.resumed = False
            yield from self._judge_resume(track, seen, as_expected=expected is not None and not track.off_schedule)
        track.take(seen.step, seen.lr)
        meant = expected is not None and not track.off_schedule
        yield from self._judge_zeros(track, seen, meant=meant)
        if track.has_vanished(seen.lr, self._vanishing) and not meant:
            yield lr_findings.vanished(seen, track, self._driving(seen.optimizer))
        yield from self._judge_norm(track, seen)
        track.skipped = 0

    def _look_for_schedulers(self) -> Iterator[Finding]:
        self._looked = True
        if not self._views:
            self._views = find_schedulers(self.watch.optimizers)
        for view in self._views:
            if view.index is None and view.driven is not None:
                yield lr_findings.foreign_scheduler(view, self.watch.optimizers)
        if (pair := doubled(self._views, len(self.watch.optimizers))) is not None:
            yield lr_findings.doubled(*pair)

    def _judge_values(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        for group, lr in enumerate(seen.lr):
            if not 0.0 <= lr < math.inf and "lr" in self.watch.optimizers[seen.optimizer].param_groups[group]:
                yield lr_findings.impossible(seen, group, track.last)

    def _judge_schedulers(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        states = seen.readings.get(_SCHEDULE) or [state_of(view.get()) for view in self._views]
        for view, state in zip(self._views, states, strict=True):
            if view.index == seen.optimizer and view.get() is not None:
                moved = view.look(state, seen.lr, track.skipped)
                if view.fast == _FAST_IN_A_ROW:
                    yield lr_findings.too_fast(seen, view, moved)
                if view.overran():
                    yield lr_findings.past_the_end(seen, view)

    def _judge_resume(self, track: LRTrack, seen: Observation, *, as_expected: bool) -> Iterator[Finding]:
        jump = track.jump(seen.lr, min(self._jump, _RESTARTED) if self._restarted(track, seen) else self._jump)
        if jump is not None and not as_expected and not self._scheduler_went_on(track, seen):
            yield lr_findings.jumped(seen, track, *jump)

    def _scheduler_went_on(self, track: LRTrack, seen: Observation) -> bool:
        """Whether the lr is what a scheduler says that stands where it stood or further: then it is meant."""
        return any(
            view.last is not None and track.position is not None and view.last >= track.position
            for view in self._driving(seen.optimizer)
            if last_lr(view.get()) == seen.lr
        )

    def _restarted(self, track: LRTrack, seen: Observation) -> bool:
        """Whether the lr is that of the run's first step, by a scheduler that stands at its start and stood further."""
        before = track.position
        begins = any(view.last is not None and view.last <= 1 for view in self._driving(seen.optimizer))
        return begins and before is not None and before >= _MOVED_ON and track.at_first(seen.lr)

    def _driving(self, index: int) -> list[SchedulerView]:
        return [view for view in self._views if view.index == index]

    def _judge_zeros(self, track: LRTrack, seen: Observation, *, meant: bool) -> Iterator[Finding]:
        for view in self._driving(seen.optimizer)[:1]:
            track.position = view.last
        if any(seen.lr):
            track.zeros, track.was_positive = 0, True
            return
        track.zeros += 1
        if track.zeros == self._zero_steps and not meant and not track.told_vanished:
            yield lr_findings.zero(seen, track, [view.name for view in self._driving(seen.optimizer)])

    def _judge_norm(self, track: LRTrack, seen: Observation) -> Iterable[Finding]:
        norm = seen.grad_norm
        if norm is None or track.history.usual(norm, high=self._spike):
            return ()
        standing = track.history.take(norm, high=self._spike)
        if standing is None or standing.side != "high" or standing.adopted or not track.at_peak(seen.lr):
            return ()
        return (lr_findings.spike_at_peak(seen, standing, track, self._spike),)

    def finish(self) -> Iterable[Finding]:
        # An exception on its way out ends a run before its time: a schedule by epochs may not have had its turn.
        if sys.exc_info()[0] is not None:
            return
        for view in self._views:
            track = None if view.index is None else self._tracks.get(view.index)
            if track is None or view.get() is None or track.unchanged < self._unstepped_after:
                continue
            view.look_again()
            if view.never_moved and not view.waits_for_metric and not track.changed:
                yield lr_findings.never_stepped(view, track)
            elif view.differs + 1 >= self._unstepped_after and view.differs > view.agrees:
                yield lr_findings.overwritten(view, track, last_lr(view.get()))

    def blind_spots(self) -> Iterable[str]:
        if self._watch is None:
            return
        for index, optimizer in enumerate(self.watch.optimizers):
            if self._looked and is_scheduled(optimizer) and not self._driving(index):
                yield f"the scheduler of optimizer {index}, which was not given: Guardian(..., scheduler=scheduler)"
        for view in self._views:
            if view.start is None:
                yield f"the steps of {view.name}, which has no `last_epoch` to count them"

    def state_dict(self) -> dict[str, Any]:
        return {"tracks": {str(index): track.state_dict() for index, track in self._tracks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracks.clear()
        if self._watch is None:
            self._optimizers = None
        for index, saved in state["tracks"].items():
            track = self._tracks[int(index)] = self._new_track()
            track.load_state_dict(saved)


def _check(holds: bool, name: str, given: object, expected: str) -> None:
    if not holds:
        raise GuardUsageError(f"LRTracker({name}={given!r}) cannot work: expected {expected}")
