"""Measure each step of each optimizer, and keep what waits for the host's read beside what it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.param_columns import Columns, join, unpack
from gpt_guard.callbacks.updates.param_confirm import Confirmation, Verdict
from gpt_guard.callbacks.updates.param_plan import Plan
from gpt_guard.callbacks.updates.param_rows import MOST_WAITING
from gpt_guard.callbacks.updates.param_sample import Change, overall
from gpt_guard.hooks.ledger import LATER
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation

# Steps with the same values before them, and one more, that make `Undone` suspicious.
_WRITTEN = 4


class Measured:
    """One measured step: `columns` once the host has the figures, `verdicts` where suspects were compared exactly.

    Most of it is the same in every light step: on the class, so that little is to be filled in.
    """

    closure = False
    scaling = False
    confirmation: Confirmation | None = None
    changes: Sequence[Change] = ()
    columns: Columns | None = None
    verdicts: dict[str, Verdict] | None = None

    def __init__(self, plan: Plan, settle: Callable[[], None]) -> None:
        self.plan = plan
        self.settle = settle

    def figures(self) -> dict[str, float]:
        """The overall update-to-weight ratio and the largest change; nothing if nothing could be compared after all."""
        if self.columns is None:
            self.settle()
        columns = self.columns
        return {} if columns is None else {"update_ratio": columns.ratio, "max_update": columns.largest}


class Meter:
    """Takes samples before and after each step, and exact copies of suspects in the step after somebody asked.

    `size` is the number of elements per tensor, None for all; `every` the steps from one measured step to the next.
    """

    def __init__(self, watch: Watch, size: int | None, every: int) -> None:
        self.plans: dict[int, Plan] = {}
        self._watch = watch
        self._size = size
        self._every = every
        self._wanted: dict[int, list[str]] = {}
        self._plan: Plan | None = None
        self._measuring: Plan | None = None
        self._confirming: Confirmation | None = None
        self._waiting: dict[tuple[int, int], Measured] = {}
        self._unsettled: list[Measured] = []

    def confirm(self, index: int, suspects: list[str]) -> None:
        """Have these parameters compared element by element in the next measured step of optimizer `index`."""
        if suspects:
            self._wanted[index] = suspects

    def before(self, optimizer: Optimizer) -> None:
        """Remember the values before a step."""
        watch = self._watch
        self._measuring = self._confirming = None
        if self._every > 1 and watch.step % self._every:
            return
        plan = self._plan
        # Asked for by name: all tensors are looked at again before that.
        full = watch.pace.full or bool(self._wanted)
        if full or plan is None or plan.optimizer is not optimizer or not plan.alike(optimizer):
            plan = self._plan = self._current(optimizer)
        if not plan.names:
            return
        was, known = plan.known, plan.unwritten()
        if full or not known:
            self.settle()
            if was and not known:
                # Something has begun to write to them: what puts them back does so step after step.
                watch.pace.doubt(_WRITTEN)
            if not plan.take(known=known, full=full):
                plan.keeps = False
                watch.pace.never_light()
        self._measuring = plan
        if self._wanted and plan.index in self._wanted:
            self._begin_confirmation(plan, set(self._wanted.pop(plan.index)))

    def _current(self, optimizer: Optimizer) -> Plan:
        """What this optimizer holds now."""
        watch = self._watch
        index = watch.index_of(optimizer)
        plan = self.plans.get(index)
        if plan is None or plan.outdated(optimizer):
            if plan is not None:
                self.settle()
                # Another set of parameters: what was right in the first steps may be wrong now.
                watch.inspection.restart(within_step=True)
            plan = self.plans[index] = Plan(watch, index, self._size)
        return plan

    def _begin_confirmation(self, plan: Plan, suspects: set[str]) -> None:
        known = {name: tensor for name, tensor in zip(plan.names, plan.tensors, strict=True) if name in suspects}
        if known:
            self._confirming = Confirmation(known)
            if not self._watch.closure:
                self._confirming.take_grads()

    def after(self, optimizer: Optimizer) -> None:
        """Compare with the values after the step, and put the figures into the ledger.

        In a light step a function that gives them, so that those of several steps are worked out at once.
        """
        plan, confirmation = self._measuring, self._confirming
        self._measuring = self._confirming = None
        if plan is None:
            return
        watch = self._watch
        measured = Measured(plan, self.settle)
        usual = confirmation is None and not (watch.closure or watch.scaling)
        if usual and plan.kept and not watch.pace.full:
            waiting = self._unsettled
            if waiting and (waiting[0].plan is not plan or len(waiting) >= MOST_WAITING):
                self.settle()
            if plan.note(later=True):
                waiting.append(measured)
                watch.ledger.put(LATER, measured.figures)
                self._waiting[(watch.step, plan.index)] = measured
            return
        measured.closure, measured.scaling, measured.confirmation = watch.closure, watch.scaling, confirmation
        if not (self._put_floats(measured) if plan.host else self._put_tensors(measured)):
            return
        # A fused optimizer takes the scaler's verdict along and skips by itself.
        if isinstance(overflow := getattr(optimizer, "found_inf", None), Tensor):
            watch.ledger.put("param_delta.found_inf", overflow)
        if confirmation is not None:
            if watch.closure:
                confirmation.take_grads()
            watch.ledger.put("param_delta.confirmed", confirmation.result())
            confirmation.release()
        self._waiting[(watch.step, plan.index)] = measured

    def _put_floats(self, measured: Measured) -> bool:
        """Reading is free, and a few floats are cheaper than tensors. False if there is nothing to compare."""
        self.settle()
        if not measured.plan.note(later=False):
            return False
        self._unsettled.append(measured)
        self.settle()
        columns = measured.columns
        if columns is not None:
            self._watch.ledger.put("update_ratio", columns.ratio)
            self._watch.ledger.put("max_update", columns.largest)
        return columns is not None

    def settle(self) -> None:
        """Work out the figures of all steps that wait for them."""
        waiting = self._unsettled
        if not waiting:
            return
        found = waiting[0].plan.figures(len(waiting))
        for measured, columns in zip(waiting, found, strict=True):
            measured.columns = columns
        waiting.clear()
        if None in found:
            self._watch.pace.never_light()

    def _put_tensors(self, measured: Measured) -> bool:
        """Have the figures read by the host, with the next step or at once. False if there is nothing to compare."""
        ledger = self._watch.ledger
        changes = measured.changes = measured.plan.change()
        if not changes:
            return False
        if self._watch.immediate:
            columns = measured.columns = _unpacked(changes, [change.vector.tolist() for change in changes])
            ledger.put("update_ratio", columns.ratio)
            ledger.put("max_update", columns.largest)
            return True
        ratio, largest = overall(changes)
        ledger.put("update_ratio", ratio)
        ledger.put("max_update", largest.clone())
        for place, change in enumerate(changes):
            ledger.put(f"param_delta.{place}", change.vector.clone())
        return True

    def read(self, seen: Observation) -> Measured | None:
        """What was measured in this step, with its figures; None if nothing was, or the optimizer skipped the step."""
        measured = self._waiting.pop((seen.step, seen.optimizer), None)
        if measured is None or seen.readings.get("param_delta.found_inf"):
            return None
        if measured.columns is None:
            if measured.plan.host:
                self.settle()
            else:
                vectors = [seen.readings[f"param_delta.{place}"] for place in range(len(measured.changes))]
                measured.columns = _unpacked(measured.changes, vectors)
        if measured.confirmation is not None:
            measured.verdicts = measured.confirmation.verdicts(seen.readings["param_delta.confirmed"])
        return measured


def _unpacked(changes: Sequence[Change], vectors: Sequence[list[float]]) -> Columns:
    pairs = zip(changes, vectors, strict=True)
    return join([(change.places, unpack(vector, len(change.places))) for change, vector in pairs])
