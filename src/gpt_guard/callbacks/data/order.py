"""Whether a loader that shuffles gives the same order in each epoch: told by what the order is drawn from.

No sampler is run: torch's own are known, and of others only those that draw from a number they call `epoch`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, SourceLine

_BY_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_SEEDED = frozenset({"manual_seed", "Generator", "default_rng", "RandomState", "Random", "seed"})
_MOST_WRAPPERS = 4
# One seed for each phase of a run gives two equal orders, if rarely three.
_REPEATS = {"epoch": 1, "generator": 2}


class Origin(NamedTuple):
    """What the order of an epoch is drawn from: `kind` is `epoch` or `generator`, `value` where that stands."""

    kind: str
    sampler: str
    value: Any

    def same(self, other: Origin | None) -> bool:
        """Whether both give the same order."""
        if other is None or (self.kind, self.sampler) != (other.kind, other.sampler):
            return False
        if isinstance(self.value, Tensor):
            # A generator's state lies on the host, and no mode of the user's needs to see it.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return torch.equal(self.value, other.value)
        return bool(self.value == other.value)


def origin(loader: Any) -> Origin | None:
    """From what the epoch that begins now is drawn; None for a loader that does not shuffle, or is not known."""
    sampler = _innermost(loader)
    kind = type(sampler)
    if isinstance(sampler, DistributedSampler) and kind.__iter__ is DistributedSampler.__iter__:
        return Origin("epoch", kind.__name__, (sampler.seed, sampler.epoch)) if sampler.shuffle else None
    if any(isinstance(sampler, each) and kind.__iter__ is each.__iter__ for each in _BY_GENERATOR):
        generator = sampler.generator
        state = torch.get_rng_state() if generator is None else generator.get_state()
        return Origin("generator", kind.__name__, state)
    return _by_epoch(sampler)


def _innermost(loader: Any) -> Any:
    batches, sampler = loader.batch_sampler, loader.sampler
    for _ in range(_MOST_WRAPPERS):
        if not type(batches).__module__.startswith("accelerate."):
            break
        batches = getattr(batches, "batch_sampler", None)
    if batches is None:
        return sampler
    # One of the user's own may shuffle what the sampler gives, or be all there is.
    return batches.sampler if type(batches) is BatchSampler else batches


def _by_epoch(sampler: Any) -> Origin | None:
    """A sampler of another kind that has `set_epoch` and seeds a generator with `epoch` when it is iterated."""
    own = getattr(sampler, "__dict__", {})
    code = getattr(getattr(type(sampler), "__iter__", None), "__code__", None)
    if code is None or not callable(getattr(type(sampler), "set_epoch", None)) or not own.get("shuffle", True):
        return None
    epoch = own.get("epoch")
    if not isinstance(epoch, int) or "epoch" not in code.co_names or not _SEEDED & set(code.co_names):
        return None
    return Origin("epoch", type(sampler).__name__, (own.get("seed"), epoch))


class EpochOrder:
    """Of one loader: where its newest epoch was drawn from, how often in a row from the same, batches trained in it."""

    def __init__(self) -> None:
        self.trained = 0
        self._origin: Origin | None = None
        self._equal = 0
        self._told = False

    def begins(self, loader: Any) -> None:
        """The loader is iterated once more."""
        before, self._origin = self._origin, origin(loader)
        if self._origin is None or not self._origin.same(before):
            self._equal = 0
        elif self.trained >= 2:
            # Less is a loader that is begun anew for each step.
            self._equal += 1
        self.trained = 0

    def repeated(self, line: SourceLine | None, batches: int | None) -> Finding | None:
        """GG628, once, in the second batch of an epoch whose order was there before."""
        now = self._origin
        if self._told or now is None or self.trained != 2 or self._equal < _REPEATS[now.kind]:
            return None
        self._told = True
        of = f" of {batches} batches" if batches else ""
        if now.kind == "epoch":
            seed, epoch = now.value
            how = f"its epoch stood at {epoch}" + ("" if seed is None else f" and its seed at {seed}")
        else:
            how = "the generator it draws from stood at the same place"
        return finding(
            "GG628",
            f"The newest epoch{of} comes in the order of the one before it, although {now.sampler} shuffles: each time "
            f"it began, {how}.",
            shown=["set_epoch" if now.kind == "epoch" else "reseeded"],
            where=line,
            evidence={"epochs": self._equal + 1, "sampler": now.sampler, "from": now.kind},
            cause_id="same order",
        )
