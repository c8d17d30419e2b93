"""LoopOrder: whether zero_grad, forward, backward, unscale, clip, step and scheduler.step come in a legal order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.loop_order import order_average, order_clips, order_gradients, order_schedule
from gpt_guard.callbacks.loop_order.order_calls import CallTap, sees_clipping
from gpt_guard.callbacks.loop_order.order_cycle import Cycle, Verdict
from gpt_guard.callbacks.loop_order.order_record import Recorder
from gpt_guard.callbacks.loop_order.order_tail import Tail, dropped
from gpt_guard.callbacks.settings import check_types
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.modes import TRAIN
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

Rule = Callable[[Cycle], Verdict | None]


class LoopOrder(Guard):
    """Judges the order of the loop's calls in the inspected steps; findings show it, with lines, next to the legal one.

    In an inspected step `zero_grad`, `scheduler.step`, `unscale_` and torch's clipping functions are patched, and lines
    and version counters are noted; nothing is read but with the one read of the step. Afterwards all of that is gone.
    What stays on costs a few comparisons a step: accumulation whose last micro-batches are dropped at the end of an
    epoch.

    Nearly every rule wants to see the same order in two steps in a row: one step may be left out for a reason.

    - `uneven`: of micro-batches that are averaged each on its own, how many times as much an element of one may count
      as an element of another, two steps in a row. That accumulation is then not the mean over the whole batch was
      described for language models in October 2024 (Unsloth and Hugging Face, on fixing gradient accumulation).

    Raises GuardUsageError for a figure that cannot work.
    """

    light: ClassVar[frozenset[str]] = frozenset()
    late = True

    def __init__(self, *, uneven: float = 2.0) -> None:
        check_types(LoopOrder, locals())
        if not uneven > 1.0:
            raise GuardUsageError(f"LoopOrder(uneven={uneven!r}) cannot work: expected a factor above 1")
        self._rules: dict[str, Rule] = {
            "cleared_in_each": order_gradients.cleared_in_each,
            "never_cleared": order_gradients.never_cleared,
            "cleared_before_step": order_gradients.cleared_before_step,
            "backward_twice": order_gradients.backward_twice,
            "stepped_twice": order_gradients.stepped_twice,
            "clipped_after_step": order_clips.clipped_after_step,
            "clipped_nothing": order_clips.clipped_nothing,
            "clipped_away": order_clips.clipped_away,
            "clipped_between": order_clips.clipped_between,
            "clipped_scaled": order_clips.clipped_scaled,
            "scheduled_first": order_schedule.scheduled_first,
            "scheduled_in_each": order_schedule.scheduled_in_each,
            "scheduled_another": order_schedule.scheduled_another,
            "not_divided": order_average.not_divided,
            "unequal_means": partial(order_average.unequal_means, limit=uneven),
        }
        self._tail = Tail()
        self._rows: dict[tuple[int, str, str], int] = {}
        self._recorder: Recorder | None = None
        self._tap: CallTap | None = None

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        TRAIN.add(self)
        watch.inspection.on_begin(self._begin)
        watch.inspection.on_end(self._end)

    def detach(self) -> None:
        TRAIN.remove(self)
        self._end()
        super().detach()

    # Inspected steps.

    def _begin(self) -> None:
        watch = self.watch
        if not watch.optimizers:
            return
        self._rows.clear()
        self._recorder = Recorder(watch)
        self._tap = CallTap(self._recorder, lambda act, call: watch.inspection.run(self._hear, act, call))
        watch.forward_begins.append(self._forward_begins)
        self._tap.open(watch.optimizers, watch.scheduler)

    def _end(self) -> None:
        tap, self._tap, self._recorder = self._tap, None, None
        if tap is not None:
            tap.close()
        if self._watch is not None and self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)

    def _hear(self, act: Callable[[Any], None], call: Any) -> None:
        act(call)

    def _forward_begins(self) -> None:
        if self._recorder is not None:
            self._recorder.forward_begins()

    def before_backward(self, loss: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.backward_begins(loss)

    def after_backward(self) -> None:
        watch = self.watch
        # With several optimizers, gradients that are cleared unused may belong to the other's loss.
        if not watch.closure and len(watch.optimizers) == 1:
            self._tail.backward(watch.micro_batch if watch.model.training else 0)
        if self._recorder is not None:
            self._recorder.backward_ended()

    def before_step(self, optimizer: Optimizer) -> None:
        if self._recorder is not None:
            self._recorder.step_begins(self.watch.index_of(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        if self._recorder is not None:
            self._recorder.step_ended(self.watch.index_of(optimizer))

    # Calls of .train() and .eval(), which are noticed in any case.

    def mode_begins(self, module: nn.Module, training: bool) -> bool:
        """One call; false, since its end is of no interest."""
        if self._watch is not None and module is self._watch.model:
            self._watch.settle()
            self._tail.mode_changed()
            if self._recorder is not None:
                self._recorder.mode_changed(training)
        return False

    def mode_ended(self) -> None:
        """Never comes."""

    # What is said about it.

    def judge(self, seen: Observation) -> Iterator[Finding]:
        if seen.evaluation:
            return
        if tail := self._tail.step(seen.micro_batches):
            yield dropped(*tail, seen.step, at_end=False)
        if self._recorder is None:
            return
        if seen.skipped:
            self._recorder.skipped(seen.optimizer)
        else:
            yield from self._judge_cycle(self._recorder, seen)

    def _judge_cycle(self, recorder: Recorder, seen: Observation) -> Iterator[Finding]:
        recorder.values |= {name: each for name, each in seen.readings.items() if name.startswith(recorder.prefix)}
        last, events = recorder.cycle(seen.optimizer)
        if not events:
            return
        index = seen.optimizer
        before, rows = self._rows, {}
        running = {key for other, _, key in before if other == index}
        cycle = Cycle(index, events, last, seen, recorder.values, running)
        for name, rule in self._rules.items():
            verdict = rule(cycle)
            if verdict is not None:
                row = before.get((index, name, verdict.key), 0) + 1
                rows[index, name, verdict.key] = row
                if row == verdict.in_a_row:
                    yield verdict.finding
        self._rows = {key: row for key, row in before.items() if key[0] != index} | rows

    def finish(self) -> Iterable[Finding]:
        # An exception on its way out ends a run in the middle of whatever it was doing.
        if self._watch is not None and sys.exc_info()[0] is None and (tail := self._tail.at_end()):
            yield dropped(*tail, self.watch.step, at_end=True)

    def blind_spots(self) -> Iterable[str]:
        if not sees_clipping():
            yield "clipping: this torch has other functions for it than those that are known"

    def state_dict(self) -> dict[str, Any]:
        return {"tail": self._tail.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tail.load_state_dict(state["tail"])
