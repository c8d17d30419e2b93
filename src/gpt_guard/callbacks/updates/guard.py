"""ParamDeltaProbe: what `step()` really did to the parameters, never lr times gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.callbacks.updates.constant_loss import ConstantLoss
from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.callbacks.updates.hidden_tensors import unknown_to_model
from gpt_guard.callbacks.updates.measured_step import UpdateSampler
from gpt_guard.callbacks.updates.movement import Movement
from gpt_guard.callbacks.updates.optimizer_states import OptimizerStates
from gpt_guard.callbacks.updates.ownership import Ownership
from gpt_guard.callbacks.updates.ratio import DecayWatch, RatioBounds
from gpt_guard.callbacks.updates.restored_weights import RestoredWeights
from gpt_guard.callbacks.updates.sampling import StepFigures
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
    elements (at most 4 million of them) in the next step before anything is said. An optimizer's state is read only
    where nothing moves any more, or gradients were so large that their squares leave the range of the dtype.

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
        bounds = RatioBounds(ratio_high, ratio_low, _positive("ratio_window", ratio_window))
        self._inspect = _positive("inspect_steps", inspect_steps)
        self._reported: set[str] = set()
        self._movement = Movement(self._reported, _positive("patience", patience), lost_share, bounds)
        self._decay = DecayWatch(self._reported)
        self._restored = RestoredWeights(self._reported)
        self._constant = ConstantLoss(self._reported)
        self._states = OptimizerStates(self._reported)
        self._newest: tuple[list[str], StepFigures] | None = None
        self._waiting: list[Finding] = []
        self._sampler: UpdateSampler | None = None
        self._ownership: Ownership | None = None

    @property
    def update_ratios(self) -> dict[str, float]:
        """Update-to-weight ratio of each parameter in the last step that was judged."""
        return {} if self._newest is None else dict(zip(self._newest[0], self._newest[1].ratios(), strict=True))

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._sampler = UpdateSampler(watch, self._size, self._every)
        self._ownership = Ownership(watch, self._inspect, self._reported)

    def detach(self) -> None:
        # All of these hold tensors.
        self._sampler = self._ownership = None
        self._waiting = []
        self._restored.close()
        self._constant.close()
        self._states.close()
        super().detach()

    def before_backward(self, loss: Tensor) -> None:
        self._constant.before_backward(self.watch)
        if self._ownership is not None:
            for found in self._ownership.before_backward(loss):
                self.watch.submit(found.model_copy(update={"guard": self.name}))

    def before_step(self, optimizer: Optimizer) -> None:
        if self._sampler is not None:
            self._waiting += self._states.look(self.watch, optimizer)
            self._sampler.before(optimizer)
            self._restored.before(self.watch, optimizer, self._sampler.sampled)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._sampler is not None:
            self._sampler.after(optimizer)
            self._restored.after(self.watch)
        self._constant.after_step(self.watch)
        if self._ownership is not None:
            self._waiting += self._ownership.after_step(optimizer)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        waiting, self._waiting = self._waiting, []
        yield from waiting
        if self._ownership is not None:
            self._ownership.count_gradients(seen.optimizer, len(seen.grad_norms))
        for found in self._decay.judge(seen, self.watch.optimizers[seen.optimizer]):
            # Steps as large as the weights are the same trouble.
            self._movement.ratio_watch(seen.optimizer).reported.add("GG308")
            yield found
        sampler = self._sampler
        step = sampler.read(seen) if sampler is not None else None
        if sampler is None or step is None:
            return
        measured, figures = step
        self._newest = measured.sampled.names, figures
        yield from self._restored.judge(self.watch, seen, figures, measured.sampled.names)
        if (constant := self._constant.judge(seen, figures)) is not None:
            yield constant
        self._states.judge(self.watch, seen, measured.sampled, figures)
        yield from self._movement.judge(self.watch, sampler, seen, measured, figures)

    def finish(self) -> Iterable[Finding]:
        waiting, self._waiting = self._waiting, []
        yield from waiting
        for optimizer in self.watch.optimizers:
            yield from self._states.look(self.watch, optimizer)
        if self._ownership is not None:
            yield from self._ownership.finish()

    def blind_spots(self) -> Iterable[str]:
        sampled = self._sampler.sampled.values() if self._sampler is not None else ()
        left_out = [name for each in sampled for name in each.left_out]
        if left_out:
            yield f"updates of {listed(left_out)}: no dense floating-point values to compare"
        if self.watch.sharded:
            yield "trainable tensors that the model does not know (GG303): the graph of sharded parameters does not say"
        if hidden := unknown_to_model(self._reported):
            yield f"what the model does not know (GG303), and modules in it: {listed(hidden)}"

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._reported), **self._movement.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported |= set(state["said"])
        self._movement.load_state_dict(state)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise GuardUsageError(f"{name} is {value}; it counts steps or elements and must be at least 1")
    return value
