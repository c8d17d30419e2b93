"""Measure each step of each optimizer, and keep what waits for the host's read beside what it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.param_confirm import Confirmation, Verdict
from gpt_guard.callbacks.param_plan import Columns, Plan
from gpt_guard.callbacks.param_sample import Change, overall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Observation


@dataclass(slots=True)
class Measured:
    """One measured step: `columns` once the host has the figures, `verdicts` where suspects were compared exactly."""

    plan: Plan
    changes: list[Change]
    closure: bool
    scaling: bool
    confirmation: Confirmation | None
    columns: Columns | None = None
    verdicts: dict[str, Verdict] | None = None


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
        self._measuring: Plan | None = None
        self._confirming: Confirmation | None = None
        self._waiting: dict[tuple[int, int], Measured] = {}

    def confirm(self, index: int, suspects: list[str]) -> None:
        """Have these parameters compared element by element in the next measured step of optimizer `index`."""
        if suspects:
            self._wanted[index] = suspects

    def before(self, optimizer: Optimizer) -> None:
        """Remember the values before a step."""
        watch = self._watch
        self._measuring = self._confirming = None
        if watch.step % self._every:
            return
        index = watch.index_of(optimizer)
        plan = self.plans.get(index)
        if plan is None:
            plan = self.plans[index] = Plan(watch, index, self._size)
        elif plan.outdated(optimizer):
            plan = self.plans[index] = Plan(watch, index, self._size)
            # Another set of parameters: what was right in the first steps may be wrong now.
            watch.inspection.restart(within_step=True)
        if not plan.names:
            return
        plan.take()
        self._measuring = plan
        if index in self._wanted:
            self._begin_confirmation(plan, set(self._wanted.pop(index)))

    def _begin_confirmation(self, plan: Plan, suspects: set[str]) -> None:
        known = {name: tensor for name, tensor in zip(plan.names, plan.tensors, strict=True) if name in suspects}
        if known:
            self._confirming = Confirmation(known)
            if not self._watch.closure:
                self._confirming.take_grads()

    def after(self, optimizer: Optimizer) -> None:
        """Compare with the values after the step, and put the figures into the ledger."""
        plan, confirmation = self._measuring, self._confirming
        self._measuring = self._confirming = None
        changes = plan.change() if plan is not None else []
        if plan is None or not changes:
            return
        watch = self._watch
        measured = Measured(plan, changes, watch.closure, watch.scaling, confirmation)
        self._put(measured)
        # A fused optimizer takes the scaler's verdict along and skips by itself.
        if isinstance(overflow := getattr(optimizer, "found_inf", None), Tensor):
            watch.ledger.put("param_delta.found_inf", overflow)
        if confirmation is not None:
            if watch.closure:
                confirmation.take_grads()
            watch.ledger.put("param_delta.confirmed", confirmation.result())
            confirmation.release()
        self._waiting[(watch.step, watch.index_of(optimizer))] = measured

    def _put(self, measured: Measured) -> None:
        ledger, changes = self._watch.ledger, measured.changes
        if self._watch.immediate:
            # Reading is free here, and a few floats are cheaper on the host than as tensors.
            vectors = [_on_host(change.vector) for change in changes]
            columns = measured.columns = Columns(changes, vectors, len(measured.plan.names))
            ledger.put("update_ratio", columns.ratio)
            ledger.put("max_update", columns.largest)
            return
        ratio, largest = overall(changes)
        ledger.put("update_ratio", ratio)
        ledger.put("max_update", largest.clone())
        for place, change in enumerate(changes):
            vector = change.vector
            ledger.put(f"param_delta.{place}", vector.clone() if isinstance(vector, Tensor) else vector)

    def read(self, seen: Observation) -> Measured | None:
        """What was measured in this step, with its figures; None if nothing was, or the optimizer skipped the step."""
        measured = self._waiting.pop((seen.step, seen.optimizer), None)
        if measured is None or seen.readings.get("param_delta.found_inf"):
            return None
        if measured.columns is None:
            vectors = [seen.readings[f"param_delta.{place}"] for place in range(len(measured.changes))]
            measured.columns = Columns(measured.changes, vectors, len(measured.plan.names))
        if measured.confirmation is not None:
            measured.verdicts = measured.confirmation.verdicts(seen.readings["param_delta.confirmed"])
        return measured


def _on_host(vector: Tensor | list[float]) -> list[float]:
    values: list[float] = vector if isinstance(vector, list) else vector.tolist()
    return values
