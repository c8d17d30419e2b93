"""LRTracker: the learning rate of each group at the moment of each step, and whether a schedule could mean it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.gradients.level import RobustHistory
from gpt_guard.callbacks.schedule import findings
from gpt_guard.callbacks.schedule.foreign import ForeignSchedulers
from gpt_guard.callbacks.schedule.rates import Expected, ExpectedLR, LRTrack, same_rates
from gpt_guard.callbacks.schedule.schedulers import (
    SchedulerView,
    doubled,
    find_schedulers,
    is_scheduled,
    last_lr,
    views,
)
from gpt_guard.callbacks.schedule.unknown_keys import UnknownKeys
from gpt_guard.callbacks.settings import check_types
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

_FAST_IN_A_ROW = 3
_MOVED_ON = 3
# Looking for live schedulers takes some tens of milliseconds.
_MOST_LOOKS = 5


class LRTracker(Guard):
    """Judges the learning rate as the optimizer uses it, beside the scheduler and the gradient norm.

    `expected` is the schedule you mean: a function of the step number, or a list with an entry for each step; each
    gives one lr or one for each group, compared within `rtol`. lr 0 is reported after `zero_steps` steps in a row: a
    warm-up from 0 and a cosine to 0 have one each. A scheduler that never moved is reported at the end of a run of at
    least `unstepped_after` steps. An lr that stays below `vanishing` times its own peak is reported: with Adam a weight
    moves by about lr in a step, and a millionth of a usual peak (1e-3) is below the spacing of float32 numbers at 0.02,
    the usual size of a weight. So is a scheduler that is past its own end by a tenth. `jump_factor` bounds the change
    of the lr over a resume. A leap of `restart_factor` or more, back to the lr of the first step by a new scheduler
    that stands at its start, is a schedule that begins again; a cosine that is made again after a fifth of its length
    leaps by 1.1. Warm restarts and cycles go on counting, and a lr that is set by hand has no such scheduler. A
    gradient norm of `spike_factor` times the median of the last `window` usual ones, beyond `sigmas` robust standard
    deviations and after `least` of them, is a spike; here it counts only at the schedule's peak. Both figures are those
    of GradNormMonitor, and so is their source.

    Schedulers are those given to Guardian. Where none was given and the optimizer bears the mark that torch's
    schedulers leave on it, they are looked for once among the live objects of the process, at the first step.

    Reads nothing from the device itself. Raises GuardUsageError for an argument that cannot work.
    """

    def __init__(
        self,
        expected: Expected | None = None,
        *,
        rtol: float = 1e-6,
        zero_steps: int = 3,
        unstepped_after: int = 20,
        vanishing: float = 1e-6,
        jump_factor: float = 2.0,
        restart_factor: float = 1.1,
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
        _check(restart_factor > 1.0, "restart_factor", restart_factor, "a factor above 1")
        _check(spike_factor > 1.0, "spike_factor", spike_factor, "a factor above 1")
        self._expected = None if expected is None else ExpectedLR(expected, rtol=rtol)
        self._zero_steps, self._unstepped_after = zero_steps, unstepped_after
        self._vanishing = vanishing
        self._jump, self._restart, self._spike = jump_factor, restart_factor, spike_factor
        self._window, self._least, self._sigmas = window, least, sigmas
        self._new_track()  # raises now, not in the middle of a run, for a history that cannot work
        self._tracks: dict[int, LRTrack] = {}
        self._optimizers: list[weakref.ref[Any]] | None = None
        self._views: list[SchedulerView] = []
        self._looked = False
        self._foreign: ForeignSchedulers | None = None
        self._unknown = UnknownKeys()

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
        self._unknown = UnknownKeys()
        self._foreign = ForeignSchedulers(watch)
        self._foreign.open()

    def detach(self) -> None:
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None
        self._views = []
        super().detach()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        if seen.evaluation or not seen.lr:
            return ()
        track = self._tracks.get(seen.optimizer)
        if track is None:
            track = self._tracks[seen.optimizer] = self._new_track()
        if seen.skipped:
            track.skipped += 1
            return ()
        return self._judge(track, seen)

    def _judge(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        if not self._looked:
            yield from self._look_for_schedulers()
        if self._watch is not None:
            yield from self._unknown.judge(self.watch.optimizers[seen.optimizer], seen.optimizer, seen.step)
        for view in () if self._foreign is None else self._foreign.judge(seen.optimizer):
            if all(known.get() is not view.get() for known in self._views):
                yield findings.foreign_scheduler(view, self.watch.optimizers, seen)
        yield from self._judge_values(track, seen)
        yield from self._judge_schedulers(track, seen)
        expected = None
        if self._expected is not None and not track.off_schedule:
            expected = self._expected.at(seen.step, len(seen.lr))
            if expected is not None and not self._expected.matches(seen.lr, expected):
                track.off_schedule = True
                yield findings.off_schedule(seen, expected, self._expected.shift(seen.step, seen.lr))
        meant = expected is not None and not track.off_schedule
        if track.resumed:
            track.resumed = False
            yield from self._judge_resume(track, seen, meant=meant)
        if track.leaps_back(seen.lr, self._restart):
            yield from self._judge_restart(track, seen)
        track.take(seen.step, seen.lr)
        yield from self._judge_zeros(track, seen, meant=meant)
        if track.has_vanished(seen.lr, self._vanishing) and not meant:
            yield findings.vanished(seen, track, self._driving(seen.optimizer))
        yield from self._judge_norm(track, seen)
        track.skipped = 0

    def _look_for_schedulers(self) -> Iterator[Finding]:
        self._looked = True
        if not self._views:
            self._views = find_schedulers(self.watch.optimizers)
        for view in self._views:
            if view.index is None and view.driven is not None:
                yield findings.foreign_scheduler(view, self.watch.optimizers)
        if (pair := doubled(self._views, len(self.watch.optimizers))) is not None:
            yield findings.doubled(*pair)

    def _judge_values(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        for group, lr in enumerate(seen.lr):
            if not 0.0 <= lr < math.inf and "lr" in self.watch.optimizers[seen.optimizer].param_groups[group]:
                yield findings.impossible(seen, group, track.last)

    def _judge_schedulers(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        for view in self._driving(seen.optimizer):
            if view.get() is not None:
                moved = view.look(seen.lr, track.skipped)
                if view.fast == _FAST_IN_A_ROW:
                    yield findings.too_fast(seen, view, moved)
                if view.overran():
                    yield findings.past_the_end(seen, view)

    def _judge_resume(self, track: LRTrack, seen: Observation, *, meant: bool) -> Iterator[Finding]:
        # What is sure to be a restart needs no leap to be reported.
        limit = min(self._jump, self._restart) if self._restarted(track, seen) else self._jump
        jump = track.jump(seen.lr, limit)
        if jump is not None and not meant and not self._scheduler_went_on(track, seen):
            yield findings.jumped(seen, track, *jump)

    def _judge_restart(self, track: LRTrack, seen: Observation) -> Iterator[Finding]:
        optimizer = self.watch.optimizers[seen.optimizer]
        if track.looks >= _MOST_LOOKS or not is_scheduled(optimizer):
            return
        track.looks += 1
        begun = (view for view in find_schedulers([optimizer]) if view.last is not None and view.last <= 1)
        if (new := next((view for view in begun if not view.waits_for_metric), None)) is not None:
            track.restarts += 1
            yield findings.restarted(seen, track, new)

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
        return begins and before is not None and before >= _MOVED_ON and same_rates(seen.lr, track.first)

    def _driving(self, index: int) -> list[SchedulerView]:
        return [view for view in self._views if view.index == index]

    def _judge_zeros(self, track: LRTrack, seen: Observation, *, meant: bool) -> Iterator[Finding]:
        for view in self._driving(seen.optimizer)[:1]:
            track.position = view.last
        if any(seen.lr):
            track.zeros, track.was_positive = 0, True
            return
        track.zeros += 1
        if track.zeros == self._zero_steps and not meant and not track.reported_vanished:
            yield findings.zero(seen, track, [view.name for view in self._driving(seen.optimizer)])

    def _judge_norm(self, track: LRTrack, seen: Observation) -> Iterable[Finding]:
        standing = None if seen.grad_norm is None else track.history.take(seen.grad_norm, high=self._spike)
        if standing is None or standing.side != "high" or standing.adopted or not track.at_peak(seen.lr):
            return ()
        return (findings.spike_at_peak(seen, standing, track, self._spike),)

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
                yield findings.never_stepped(view, track)
            elif view.differs + 1 >= self._unstepped_after and view.differs > view.agrees:
                yield findings.overwritten(view, track, last_lr(view.get()))

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
