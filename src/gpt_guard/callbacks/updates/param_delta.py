"""ParamDeltaProbe: what `step()` really did to the parameters, never lr times gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.callbacks.updates.decay import DecayWatch
from gpt_guard.callbacks.updates.hidden_leaves import unknown_to_model
from gpt_guard.callbacks.updates.ownership import Wiring
from gpt_guard.callbacks.updates.param_columns import Columns
from gpt_guard.callbacks.updates.param_meter import Meter
from gpt_guard.callbacks.updates.param_moves import Moves
from gpt_guard.callbacks.updates.param_plan import listed
from gpt_guard.callbacks.updates.restored_weights import Returns
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

# Ten times the spacing of float32: below it a step changes the last digit of a weight at best. A healthy ratio is
# about 1e-3 (A. Karpathy, CS231n, "Ratio of weights:updates").
RATIO_LOW = 10 * torch.finfo(torch.float32).eps
RATIO_HIGH = 1.0


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
    light = frozenset({"before_step", "after_step"})
    late = True

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
        ratio_bounds = (ratio_high, ratio_low, _positive("ratio_window", ratio_window))
        self._inspect = _positive("inspect_steps", inspect_steps)
        self._said: set[str] = set()
        self._last: tuple[list[str], Columns] | None = None
        self._moves = Moves(self._said, _positive("patience", patience), lost_share, ratio_bounds)
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
            if not self._wiring.settled:
                # In a light step this would not run.
                self.watch.pace.doubt(2)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.before(optimizer)
            if self._returns.suspected:
                self._returns.before(self.watch, optimizer, self._meter)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.after(optimizer)
            if self._returns.suspected:
                self._returns.after(self.watch)
        if self._wiring is not None:
            found = self._wiring.after_step(optimizer)
            if found:
                self._due += found
                # Said now, not some light steps later.
                self.watch.pace.doubt(2)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        index, found = seen.optimizer, self._due
        if found:
            self._due = []
        if self._wiring is not None:
            self._wiring.count_gradients(index, len(seen.grad_norms))
        lr = max(seen.lr, default=0.0)
        if self._decay.rises(index, lr):
            found = [*found, *self._judge_decay(seen)]
        meter, moves = self._meter, self._moves
        measured = meter.read(seen) if meter is not None else None
        if meter is None or measured is None or measured.columns is None:
            return found
        plan, columns = measured.plan, measured.columns
        self._last = plan.names, columns
        if self._returns.count(seen, columns):
            found = [*found, *self._returns.judge(self.watch, seen, plan.names)]
        ratio, history = moves.of(index)
        if not measured.closure and (bad := ratio.judge(seen, plan.weights, moves.explained)):
            found = [*found, *bad]
        weight = history.weigh(lr, seen.grad_norm)
        quiet = not plan.any_frozen and history.quiet(len(plan.names), columns.least, half=plan.any_half)
        if not quiet or measured.verdicts:
            found = [*found, *moves.judge(self.watch, meter, seen, measured, weight)]
        return found

    def _judge_decay(self, seen: Observation) -> Iterable[Finding]:
        for found in self._decay.judge(seen, self.watch.optimizers[seen.optimizer]):
            # Steps as large as the weights are the same trouble.
            self._moves.ratio_watch(seen.optimizer).said.add("GG308")
            yield found

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
        if hidden := unknown_to_model(self._said):
            yield f"what the model does not know (GG303), and modules in it: {listed(hidden)}"

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._said), **self._moves.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said |= set(state["said"])
        self._moves.load_state_dict(state)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise GuardUsageError(f"{name} is {value}; it counts steps or elements and must be at least 1")
    return value
