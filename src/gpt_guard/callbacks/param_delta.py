"""ParamDeltaProbe: what `step()` really did to the parameters, never lr times gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.decay import DecayWatch
from gpt_guard.callbacks.param_confirm import Verdict
from gpt_guard.callbacks.param_history import IDLE_STEPS, History, Moved
from gpt_guard.callbacks.param_meter import Measured, Meter
from gpt_guard.callbacks.param_plan import Columns, listed
from gpt_guard.callbacks.param_words import Facts, frozen_moved, judge_confirmed, zero_gradient
from gpt_guard.callbacks.settings import check_types
from gpt_guard.callbacks.undone import Returns
from gpt_guard.callbacks.update_ratio import RatioWatch
from gpt_guard.callbacks.wiring import Wiring
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity

# Ten times the spacing of float32: below it a step changes the last digit of a weight at best. A healthy ratio is
# about 1e-3 (A. Karpathy, CS231n, "Ratio of weights:updates").
RATIO_LOW = 10 * torch.finfo(torch.float32).eps
RATIO_HIGH = 1.0
# After any of these a small update has its reason.
_EXPLAINS = ("GG301", "GG302 ", "GG304 explains", "GG305", "GG307 stale", "GG310", "GG311", "GG312")


class ParamDeltaProbe(Guard):
    """Measures the actual change of the parameters by `step()`, and says what does not move as it should.

    Runs before and after each step, stays on the device, reads nothing itself. From every tensor a fixed sample of at
    most `sample` elements is compared, spread evenly over it; a suspicion that rests on the sample is confirmed on all
    elements (at most 4 million of them) in the next step before anything is said.

    - `exact`: compare all elements in every step; costs a copy of all parameters in memory.
    - `every`: measure only every so many steps.
    - `sample`: elements per tensor.
    - `patience`: measured steps in a row after which a parameter counts as stuck.
    - `lost_share`: share of the elements with a gradient that rounding must swallow in half precision.
    - `ratio_high`, `ratio_low`, `ratio_window`: bounds for the update-to-weight ratio over all matrices, and the number
      of steps over which the lower one is judged. Sources: CS231n's rule of about 1e-3; float32's spacing.
    - `inspect_steps`: steps in which the autograd graph and the optimizers' tensors are looked at closely.

    Raises GuardUsageError for a count below 1 or a share outside of 0 to 1.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.AFTER_STEP})

    def __init__(
        self,
        *,
        exact: bool = False,
        every: int = 1,
        sample: int = 64,
        patience: int = 20,
        lost_share: float = 0.8,
        ratio_high: float = RATIO_HIGH,
        ratio_low: float = RATIO_LOW,
        ratio_window: int = 50,
        inspect_steps: int = 3,
    ) -> None:
        check_types(ParamDeltaProbe, locals())
        if not 0.0 < lost_share <= 1.0:
            raise GuardUsageError(f"lost_share is {lost_share}; it is a share, above 0 and at most 1")
        self._size = None if exact else _positive("sample", sample)
        self._every = _positive("every", every)
        self._patience = _positive("patience", patience)
        self._lost = lost_share
        self._ratio_bounds = (ratio_high, ratio_low, _positive("ratio_window", ratio_window))
        self._inspect = _positive("inspect_steps", inspect_steps)
        self._histories: dict[int, History] = {}
        self._ratio_watches: dict[int, RatioWatch] = {}
        self._said: set[str] = set()
        self._last: tuple[list[str], Columns] | None = None
        self._decay = DecayWatch(self._said)
        self._returns = Returns(self._said)
        self._due: list[Finding] = []
        self._meter: Meter | None = None
        self._wiring: Wiring | None = None

    @property
    def update_ratios(self) -> dict[str, float]:
        """Update-to-weight ratio of each parameter in the last step that was judged."""
        return {} if self._last is None else dict(zip(self._last[0], self._last[1].ratios(), strict=True))

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._meter = Meter(watch, self._size, self._every)
        self._wiring = Wiring(watch, self._inspect, self._said)

    def detach(self) -> None:
        # All of these hold tensors.
        self._meter = self._wiring = None
        self._due = []
        self._returns.close()
        super().detach()

    def before_backward(self, loss: Tensor) -> None:
        if self._wiring is not None:
            for found in self._wiring.before_backward(loss):
                self.watch.submit(found.model_copy(update={"guard": self.name}))

    def before_step(self, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.before(optimizer)
            self._returns.before(self.watch, optimizer, self._meter)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.after(optimizer)
            self._returns.after(self.watch)
        if self._wiring is not None:
            self._due += self._wiring.after_step(optimizer)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        due, self._due = self._due, []
        yield from due
        index = seen.optimizer
        if self._wiring is not None:
            self._wiring.count_gradients(index, len(seen.grad_norms))
        for found in self._decay.judge(seen, self.watch.optimizers[index]):
            # Steps as large as the weights are the same trouble.
            self._ratio_watch(index).said.add("GG308")
            yield found
        measured = self._meter.read(seen) if self._meter is not None else None
        if measured is None or measured.columns is None:
            return
        plan, columns = measured.plan, measured.columns
        self._last = plan.names, columns
        yield from self._returns.judge(self.watch, seen, plan.names, columns)
        if not measured.closure:
            yield from self._ratio_watch(index).judge(seen, plan.weights, self._explained)
        history = self._history(index)
        weight = history.weigh(max(seen.lr, default=0.0), seen.grad_norm)
        quiet = not plan.any_frozen and history.quiet(len(plan.names), min(columns.share), half=plan.any_half)
        if not quiet or measured.verdicts:
            yield from self._judge_moves(seen, measured, columns.share, weight)

    def _explains(self, found: Finding) -> Finding:
        """Remember a GG304 that explains small updates, as that of a lone bias does not."""
        if found.code == "GG304" and found.severity is not Severity.INFO:
            self._said.add("GG304 explains")
        return found

    def _explained(self) -> bool:
        """Whether it has been said already why nothing moves."""
        return any(said.startswith(_EXPLAINS) for said in self._said)

    def _judge_moves(
        self, seen: Observation, measured: Measured, share: list[float], weight: float
    ) -> Iterable[Finding]:
        plan, history = measured.plan, self._history(seen.optimizer)
        lr = [seen.lr[group] if group < len(seen.lr) else 0.0 for group in plan.groups]
        step = Moved(plan.names, share, lr, plan.own, plan.trains, plan.half, seen.grad_norms)
        facts = Facts(
            self.watch,
            self.watch.optimizers[seen.optimizer],
            seen,
            lr=dict(zip(plan.names, lr, strict=True)),
            tensors=dict(zip(plan.names, plan.tensors, strict=True)),
            ratio_low=self._ratio_bounds[1],
        )
        if measured.verdicts and seen.grad_norm:
            yield from self._judge_confirmed(facts, measured.verdicts, history, scaling=measured.scaling)
        if seen.grad_norm:
            # What a closure evaluated several times adds up to is the optimizer's choice; a line search may stay put.
            history.count(step, 0.0 if measured.closure or history.converged(seen.grad_norm) else weight)
            history.count_zero_grads(step)
        if thawed := self._new("GG306", history.thawed()):
            yield frozen_moved(facts, thawed)
        if zero := self._new("GG304", history.never_had_gradient(self.watch.model)):
            yield self._explains(zero_gradient(facts, zero, self._patience))
        self._ask(seen.optimizer, history, step)

    def _judge_confirmed(
        self, facts: Facts, verdicts: Mapping[str, Verdict], history: History, *, scaling: bool
    ) -> Iterable[Finding]:
        idle = history.idle >= IDLE_STEPS
        moved = {name for name in verdicts if history.has_moved(name)}
        for found, names in judge_confirmed(facts, verdicts, moved, idle=idle, lost=self._lost, scaling=scaling):
            self._said |= {f"moves {name}" for name in names}
            ratio = self._ratio_watch(facts.seen.optimizer)
            # That steps are too small, and that they are too small to change anything, is said once.
            if found.code in ("GG301", "GG309") and "GG309" in ratio.said:
                continue
            ratio.said.add(found.code)
            # Parameters get stuck one after the other; that all of them round, or none moves, is said once.
            if found.code == "GG304" or found.code not in self._said:
                self._said.add(found.code)
                yield self._explains(found)
        history.excuse([name for name in verdicts if f"moves {name}" not in self._said])
        if any(verdict.changed for verdict in verdicts.values()):
            history.idle = 0.0

    def _ask(self, index: int, history: History, step: Moved) -> None:
        """Have the suspects compared exactly in the next step."""
        if self._meter is None:
            return
        if history.idle >= IDLE_STEPS and "GG301" not in self._said:
            pairs = zip(step.names, step.trains, step.own, strict=True)
            self._meter.confirm(index, [name for name, trains, own in pairs if trains and own and step.grads.get(name)])
        elif history.still:
            own = {name for name, own in zip(step.names, step.own, strict=True) if own}
            stuck = [name for name in history.stuck() if name in own and f"moves {name}" not in self._said]
            self._meter.confirm(index, stuck)

    def _new(self, code: str, names: Iterable[str]) -> list[str]:
        fresh = [name for name in names if f"{code} {name}" not in self._said]
        self._said |= {f"{code} {name}" for name in fresh}
        return fresh

    def _history(self, index: int) -> History:
        if index not in self._histories:
            self._histories[index] = History(self._patience, 1.0 - self._lost)
        return self._histories[index]

    def _ratio_watch(self, index: int) -> RatioWatch:
        if index not in self._ratio_watches:
            self._ratio_watches[index] = RatioWatch(*self._ratio_bounds)
        return self._ratio_watches[index]

    def finish(self) -> Iterable[Finding]:
        due, self._due = self._due, []
        yield from due
        if self._wiring is not None:
            yield from self._wiring.finish()

    def blind_spots(self) -> Iterable[str]:
        plans = self._meter.plans.values() if self._meter is not None else ()
        left_out = [name for plan in plans for name in plan.left_out]
        if left_out:
            yield f"updates of {listed(left_out)}: no dense floating-point values to compare"

    def state_dict(self) -> dict[str, Any]:
        return {
            "said": sorted(self._said),
            "histories": {str(index): each.state_dict() for index, each in self._histories.items()},
            "ratios": {str(index): each.state_dict() for index, each in self._ratio_watches.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said |= set(state["said"])
        for index, saved in state["histories"].items():
            self._history(int(index)).load_state_dict(saved)
        for index, saved in state["ratios"].items():
            self._ratio_watch(int(index)).load_state_dict(saved)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise GuardUsageError(f"{name} is {value}; it counts steps or elements and must be at least 1")
    return value
