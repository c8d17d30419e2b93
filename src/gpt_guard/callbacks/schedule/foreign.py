"""A scheduler that nobody gave to Guardian and that drives another optimizer over the same parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from gpt_guard.callbacks.loop_order.calls import ScheduleCalls
from gpt_guard.callbacks.schedule.rates import same_rates
from gpt_guard.callbacks.schedule.schedulers import SchedulerView, last_lr
from gpt_guard.hooks.copies import HookSet, Uncopied
from gpt_guard.hooks.watch import Watch

_STEPS = 3


class _Driven:
    """One such scheduler: what lr it had when it was first seen, and what the watched optimizer had."""

    def __init__(self, scheduler: Any, index: int, lr: tuple[float, ...]) -> None:
        self.get = weakref.ref(scheduler)
        self.index = index
        self.began = last_lr(scheduler)
        self.lr = lr
        self.steps = 0
        self.judged = 0
        self.told = False


class ForeignSchedulers:
    """Sees `scheduler.step()` in inspected steps; what was seen is followed from then on.

    Told once the scheduler has moved its lr, while its optimizer was never stepped and the watched one, which holds the
    same tensors, kept its own lr. Wrappers (SAM, Lookahead) share the very groups with what they wrap, and are left
    out; so is an optimizer that steps too.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._found: list[_Driven] = []
        self._hooks = HookSet()
        self._calls = ScheduleCalls(self._scheduled)

    def open(self) -> None:
        """Begin to see; whoever holds this closes it, also where this is cut short."""
        self._watch.inspection.on_end(self._calls.close)
        self._watch.inspection.on_begin(self._calls.open)

    def close(self) -> None:
        """Take everything away; may run twice."""
        self._calls.close()
        self._hooks.close()
        self._found.clear()

    def _scheduled(self, scheduler: Any) -> None:
        optimizers = self._watch.optimizers
        driven = SchedulerView(scheduler, optimizers, found=True).driven
        if not isinstance(driven, Optimizer) or any(each.get() is scheduler for each in self._found):
            return
        index = next((place for place, own in enumerate(optimizers) if _beside(driven, own)), None)
        if index is None or any(_shares_groups(driven, own) for own in optimizers):
            return
        found = _Driven(scheduler, index, _rates(optimizers[index]))
        self._found.append(found)
        self._hooks.after_step(driven, _Steps(found))

    def judge(self, index: int) -> Iterator[SchedulerView]:
        """Those that are sure by now; runs before each step of the optimizer `index`."""
        for each in self._found:
            scheduler = each.get()
            if each.told or each.index != index or scheduler is None or each.steps:
                continue
            now, own = last_lr(scheduler), _rates(self._watch.optimizers[index])
            each.judged += 1
            moved = now is not None and each.began is not None and not same_rates(now, each.began)
            if moved and now != own and each.judged >= _STEPS and own == each.lr:
                each.told = True
                yield SchedulerView(scheduler, self._watch.optimizers, found=True)


class _Steps(Uncopied):
    __slots__ = ("_of",)

    def __init__(self, of: _Driven) -> None:
        self._of = of

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._of.steps += 1


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    # A rate that lies on a device is not read.
    rates = (group.get("lr") for group in optimizer.param_groups)
    return tuple(float(lr) if isinstance(lr, (int, float)) else 0.0 for lr in rates)


def _shares_groups(one: Optimizer, other: Optimizer) -> bool:
    groups = {id(group) for group in other.param_groups}
    return one is other or any(id(group) in groups for group in one.param_groups)


def _beside(one: Optimizer, other: Optimizer) -> bool:
    tensors = {id(tensor) for group in other.param_groups for tensor in group["params"]}
    return any(id(tensor) in tensors for group in one.param_groups for tensor in group["params"])
