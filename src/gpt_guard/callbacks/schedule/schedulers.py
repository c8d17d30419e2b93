"""What can be known of a learning rate scheduler from outside: its position, its last lr, the optimizer it drives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from gpt_guard.callbacks.schedule.rates import same_rates


class SchedulerView:
    """One scheduler, looked at once per optimizer step; reads no device.

    `index` is the place of the optimizer it drives among the watched ones, or None for a foreign or unknown one.
    `start` and `last` are its positions when first and last looked at, None where it keeps none. `fast` counts steps
    in a row in which it moved too far; `differs` those in which the group's lr was not the scheduler's, `agrees` those
    in which it was, both counted from its first move. `length` is the position at which it has come to its own end.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[Optimizer], *, found: bool = False) -> None:
        inner = unwrapped(scheduler)
        # One that was found must not be kept alive by being watched.
        self.get: Callable[[], Any] = weakref.ref(inner) if found else lambda: inner
        self.name = type(inner).__name__
        self.found = found
        self.waits_for_metric = isinstance(inner, ReduceLROnPlateau)
        self.driven = _plain(getattr(inner, "optimizer", None))
        self.index = next((place for place, own in enumerate(optimizers) if own is self.driven), None)
        self.start = self.last = position(inner)
        self.judged = 0
        self.fast = 0
        self.agrees = 0
        self.differs = 0
        self.length = length(inner)
        self._overran = False

    def look(self, lr: tuple[float, ...], skipped: int) -> int:
        """Take in how it stands before an optimizer step; returns by how much it moved since the last one.

        Skipped steps are taken off.
        """
        scheduler = self.get()
        now, own = position(scheduler), last_lr(scheduler)
        moved = 0 if now is None or self.last is None or not self.judged else now - self.last
        self.last = now
        self.judged += 1
        if now != self.start and own is not None and len(own) == len(lr):
            if same_rates(own, lr):
                self.agrees += 1
            else:
                self.differs += 1
        # Each process of a distributed run may step once for all of them, as accelerate's scheduler does.
        fast = moved >= 2 and moved > 1 + skipped and moved != _processes()
        self.fast = self.fast + 1 if fast else 0
        return moved

    def overran(self) -> bool:
        """True once: its position is past its own length, by a tenth and more than one step."""
        # Drop-last and rounded-up step counts are off by a little.
        if self.length is None or self.last is None or self._overran or self.last <= 1.1 * self.length + 1:
            return False
        # It may have been loaded, or given another length, after it was first looked at.
        self.length = length(self.get())
        self._overran = self.length is not None and self.last > 1.1 * self.length + 1
        return self._overran

    @property
    def per_step(self) -> bool:
        """Whether it moves with the optimizer steps rather than with the epochs."""
        return self.last is not None and self.start is not None and self.last - self.start >= 0.5 * (self.judged - 1)

    def look_again(self) -> None:
        """Take the position at the end, after the last optimizer step."""
        self.last = position(self.get())

    @property
    def never_moved(self) -> bool:
        """Whether it has a position and has kept it since it was first looked at."""
        return self.start is not None and self.last == self.start


def views(given: Any, optimizers: Sequence[Optimizer]) -> list[SchedulerView]:
    """Views of the scheduler or schedulers that Guardian was given; none for None."""
    if given is None:
        return []
    several = given if isinstance(given, (list, tuple)) else [given]
    return [SchedulerView(scheduler, optimizers) for scheduler in several if scheduler is not None]


def doubled(known: Sequence[SchedulerView], optimizers: int) -> tuple[SchedulerView, int] | None:
    """A scheduler that drives an optimizer as another one with the same settings does, and one that none drives.

    Two that are chained differ in kind or settings. None where there is no such pair.
    """
    driven = {view.index for view in known}
    free = next((index for index in range(optimizers) if index not in driven), None)
    # Of schedulers that were found, one may be left over from before.
    if free is None or len(known) != optimizers or None in driven or any(view.found for view in known):
        return None
    for place, view in enumerate(known):
        own = _settings(view.get())
        for other in known[:place]:
            if own and (view.index, view.name, own) == (other.index, other.name, _settings(other.get())):
                return view, free
    return None


def _settings(scheduler: Any) -> dict[str, float]:
    """The numbers that it was made with, by name; none for one that asks a function."""
    plain = vars(scheduler) if hasattr(scheduler, "__dict__") else {}
    return {
        name: value
        for name, value in plain.items()
        if isinstance(value, (int, float)) and not name.startswith("_") and name not in ("last_epoch", "verbose")
    }


def is_scheduled(optimizer: Optimizer) -> bool:
    """Whether a torch scheduler was ever made for this optimizer: it marks the optimizer's step method."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def find_schedulers(optimizers: Sequence[Optimizer]) -> list[SchedulerView]:
    """The live torch schedulers that drive these optimizers, where Guardian was given none.

    Looks through all objects of the process, which takes some tens of milliseconds: once, and only for an optimizer
    whose step says that it has a scheduler. Schedulers inside SequentialLR or ChainedScheduler are left to their owner.
    """
    wanted = {id(optimizer) for optimizer in optimizers if is_scheduled(optimizer)}
    if not wanted:
        return []
    # type() and not isinstance(): asking a stranger's object for its __class__ may run code of its own.
    live = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    ours = [each for each in live if id(each.__dict__.get("optimizer")) in wanted]
    inside = {id(part) for each in ours for part in each.__dict__.get("_schedulers", ())}
    return [SchedulerView(each, optimizers, found=True) for each in ours if id(each) not in inside]


def unwrapped(scheduler: Any) -> Any:
    """The scheduler itself, out of a Lightning-style dict or a wrapper that holds it in `.scheduler`."""
    if isinstance(scheduler, dict) and "scheduler" in scheduler:
        scheduler = scheduler["scheduler"]
    while not hasattr(scheduler, "last_epoch") and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def position(scheduler: Any) -> int | None:
    """How many steps it has made; ChainedScheduler keeps none of its own, its parts do. None if unknown."""
    own = getattr(scheduler, "last_epoch", None)
    if own is None and (parts := getattr(scheduler, "_schedulers", None)):
        return position(parts[0])
    return int(own) if isinstance(own, (int, float)) else None


def length(scheduler: Any) -> int | None:
    """The position at which it has done all that it was made for, where torch's own kinds have one.

    Of those that go on repeating, or stay where they are, this is not asked: LinearLR ends at its full lr.
    """
    kind = type(scheduler)
    if kind is CosineAnnealingLR:
        own = scheduler.T_max
    elif kind is OneCycleLR:
        own = scheduler.total_steps
    elif kind is SequentialLR:
        last, begins = length(scheduler._schedulers[-1]), scheduler._milestones[-1:]
        own = None if last is None or not begins else begins[0] + last
    else:
        return None
    return int(own) if isinstance(own, (int, float)) and own > 0 else None


def last_lr(scheduler: Any) -> tuple[float, ...] | None:
    """The learning rates it computed last, by group; None where it keeps none or they lie on an accelerator."""
    values = getattr(scheduler, "_last_lr", None)
    if not isinstance(values, (list, tuple)):
        return None
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
        return None
    return tuple(float(value) for value in values)


def _plain(optimizer: Any) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
