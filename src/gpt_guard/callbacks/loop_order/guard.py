"""LoopOrder: whether zero_grad, forward, backward, unscale, clip, step and scheduler.step come in a legal order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.loop_order.calls import LoopCalls, sees_clipping
from gpt_guard.callbacks.loop_order.cycle import Cycle
from gpt_guard.callbacks.loop_order.record import LoopRecorder
from gpt_guard.callbacks.loop_order.rules import RULES
from gpt_guard.callbacks.loop_order.tail import Tail, dropped
from gpt_guard.callbacks.settings import check_types
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.modes import TRAIN
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation


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

    def __init__(self, *, uneven: float = 2.0) -> None:
        check_types(LoopOrder, locals())
        if not uneven > 1.0:
            raise GuardUsageError(f"LoopOrder(uneven={uneven!r}) cannot work: expected a factor above 1")
        self._uneven = uneven
        self._tail = Tail()
        # By optimizer, rule and key: in how many cycles in a row it was seen.
        self._rows: dict[int, dict[tuple[str, str], int]] = {}
        self._recorder: LoopRecorder | None = None
        self._calls: LoopCalls | None = None

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        TRAIN.add(self)
        watch.groups_changed.append(self._groups_changed)
        watch.inspection.on_begin(self._begin)
        watch.inspection.on_end(self._end)

    def detach(self) -> None:
        TRAIN.remove(self)
        self._end()
        super().detach()

    # Inspected steps.

    def _groups_changed(self) -> None:
        if self._recorder is not None:
            self._recorder.renew()

    def _begin(self) -> None:
        watch = self.watch
        if not watch.optimizers:
            return
        self._rows.clear()
        self._recorder = LoopRecorder(watch)
        self._calls = LoopCalls(lambda what, subject: watch.inspection.run(self._hear, what, subject))
        watch.forward_begins.append(self._forward_begins)
        self._calls.open(watch.optimizers, watch.scheduler)

    def _end(self) -> None:
        # Forgotten only once it is closed: an interrupt in between leaves it to be closed by the next call.
        if self._calls is not None:
            self._calls.close()
        self._calls = self._recorder = None
        if self._watch is not None and self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)

    def _hear(self, what: str, subject: Any) -> None:
        if self._recorder is not None:
            getattr(self._recorder, what)(subject)

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
            self._tail.mode_changed()
        return False

    def mode_ended(self) -> None:
        """Never called: `mode_begins` asks for no end."""

    # Judging.

    def judge(self, seen: Observation) -> Iterator[Finding]:
        if seen.evaluation:
            return
        if tail := self._tail.step(seen.micro_batches):
            yield dropped(*tail, True, seen.step, at_end=False)
        if self._recorder is None:
            return
        if seen.skipped:
            self._recorder.skipped(seen.optimizer)
        else:
            yield from self._judge_cycle(self._recorder, seen)

    def _judge_cycle(self, recorder: LoopRecorder, seen: Observation) -> Iterator[Finding]:
        recorder.values |= {name: each for name, each in seen.readings.items() if name.startswith(recorder.prefix)}
        last, events = recorder.cycle(seen.optimizer)
        if not events:
            return
        before, rows = self._rows.get(seen.optimizer, {}), {}
        running = {key for _, key in before}
        cycle = Cycle(seen.optimizer, events, last, seen, recorder.values, running, self._uneven)
        for rule in RULES:
            if (result := rule(cycle)) is not None:
                row = rows[rule.__name__, result.key] = before.get((rule.__name__, result.key), 0) + 1
                if row == result.in_a_row:
                    yield result.finding
        self._rows[seen.optimizer] = rows

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
