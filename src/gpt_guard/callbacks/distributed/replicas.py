"""ReplicaSync: processes that train one model together must hold the same weights and apply the same gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.data.hashes import bits_of
from gpt_guard.callbacks.settings import check_types, patterns
from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.tensors import is_sharded, walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

# What stands for a gradient that does not exist.
_NONE = torch.iinfo(torch.int64).min
# The data of one step may be equal by chance, where it is tiny; in three it is not.
_SAME_DATA = 3


class ReplicaSync(Guard):
    """Compares exact checksums of weights, gradients and batches over the ranks of a process group.

    Every rank must have it, with the same settings: it calls `all_gather` in the first `first` steps and in one of
    every `every` steps after them, once before and once after the step. It is not in the default set, since a
    collective that one rank does not join waits for ever. Sharded parameters (FSDP, DTensor) are not replicas and are
    named as not watched. Does nothing where torch.distributed is not initialised or the group has one rank, and says
    so. `group` is the data-parallel process group; None is the default group. `only` are patterns of parameters: those
    that a tensor-parallel group holds in common, such as `"*norm*"`. It shares its batches; they are then not compared.

    Raises GuardUsageError for counts below 1.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.BEFORE_STEP, Moment.AFTER_STEP})

    def __init__(self, *, first: int = 3, every: int = 100, group: Any = None, only: Iterable[str] = ()) -> None:
        check_types(ReplicaSync, locals())
        for name, count in (("first", first), ("every", every)):
            if count < 1:
                raise GuardUsageError(f"{name} is {count}; it counts steps and must be at least 1")
        self._first = first
        self._every = every
        self._group = group
        self._only = patterns("ReplicaSync", "only", only)
        self._reported: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._sharded: list[str] = []
        self._started = 0
        self._steps = 0
        self._after_backward: Tensor | None = None
        self._batch = 0
        self._equal_after = -1
        self._same_batches = 0
        self._due: list[Finding] = []

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._list()
        watch.groups_changed.append(self._list)
        watch.forward_begins.append(self._forward_begins)

    def _list(self) -> None:
        self._names, self._tensors, self._sharded, self._after_backward = [], [], [], None
        for name, tensor in self.watch.parameters.items():
            if self._only and not any(fnmatchcase(name, pattern) for pattern in self._only):
                continue
            if is_sharded(tensor):
                self._sharded.append(name)
            else:
                self._names.append(name)
                self._tensors.append(tensor)

    def detach(self) -> None:
        self._clear()
        super().detach()

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def _looks(self) -> bool:
        due = self._steps < self._first or self._steps % self._every == 0
        return due and bool(self._tensors) and self._ranks > 1

    def _forward_begins(self) -> None:
        if self._looks and not self.watch.evaluation and self.watch.tap.inputs is not None:
            given = [tensor for _, tensor in walk(self.watch.tap.inputs)]
            # A checksum of all that the model is called with in the step: several micro-batches add up.
            self._batch += sum(int(checksum(tensor)) for tensor in given) % 2**31

    def after_backward(self) -> None:
        if self._looks:
            self._after_backward = self._gradients()

    def _gradients(self) -> Tensor:
        return self._stack([tensor.grad for tensor in self._tensors])

    def _stack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        device = self._tensors[0].device
        nothing = torch.full((), _NONE, device=device)
        return torch.stack([nothing if each is None else checksum(each).to(device) for each in tensors])

    def _gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, `[R, n]`; every rank waits here for the others."""
        found = [torch.empty_like(values) for _ in range(self._ranks)]
        dist.all_gather(found, values, group=self._group)
        return torch.stack(found).cpu()

    def before_step(self, optimizer: Optimizer) -> None:
        """Weights as the step finds them, gradients as they came from backward and as they are now, and the batch."""
        if not self._looks:
            return
        now = self._gradients()
        then = now if self._after_backward is None else self._after_backward
        batch = torch.tensor([self._batch], device=now.device)
        gathered = self._gather(torch.cat([self._stack(self._tensors), then, now, batch]))
        count = len(self._names)
        weights, then, now = (gathered[:, part * count : (part + 1) * count] for part in range(3))
        if apart := self._apart(weights):
            self._due.append(self._weights_apart(apart, weights, *self._since_when()))
        self._due += self._judge_gradients(then, now)
        if not self._only:
            self._judge_batch(gathered[:, -1])
        self._after_backward, self._batch = None, 0

    def after_step(self, optimizer: Optimizer) -> None:
        """Weights as the step leaves them."""
        if self._looks:
            weights = self._gather(self._stack(self._tensors))
            if apart := self._apart(weights):
                because = "gradients_apart" if self._reported & {"GG811", "GG812"} else "optimizer_apart"
                self._due.append(self._weights_apart(apart, weights, because, "after the step"))
            else:
                self._equal_after = self._steps
        self._steps += 1

    def judge(self, seen: Observation) -> Iterable[Finding]:
        due, self._due = self._due, []
        for found in due:
            if found.code not in self._reported:
                self._reported.add(found.code)
                yield found

    # What is reported.

    def _since_when(self) -> tuple[str, str]:
        """The cause that fits weights which a compared step finds apart, and when that is."""
        if not self._steps:
            return "start_apart", "before the first step"
        steps = self._steps - 1 - self._equal_after
        if not steps:
            return "written_apart", "before the step, and were equal after the one before it"
        return (
            "gradients_apart",
            f"before the step, and were equal {steps + 1} steps ago, since when nothing was compared",
        )

    def _apart(self, values: Tensor) -> list[int]:
        """Which columns are not the same on all ranks."""
        return torch.nonzero((values != values[0]).any(0)).flatten().tolist()

    def _weights_apart(self, apart: list[int], values: Tensor, likely: str, when: str) -> Finding:
        return self._finding(
            "GG810",
            f"{len(apart)} of {len(self._names)} parameters differ between the ranks {when} "
            f"({self._listed(apart)}); {_odd_ranks(values, apart)}.",
            likely,
            apart,
        )

    def _judge_gradients(self, then: Tensor, now: Tensor) -> Iterator[Finding]:
        apart = self._apart(now)
        missing = [place for place in apart if bool((now[:, place] == _NONE).any())]
        if missing:
            without = [rank for rank in range(len(now)) if int(now[rank, missing[0]]) == _NONE]
            yield self._finding(
                "GG812",
                f"{len(missing)} of {len(self._names)} parameters ({self._listed(missing)}) have a gradient on some "
                f"ranks only; `{self._names[missing[0]]}` has none on rank {', '.join(map(str, without))}.",
                "branch",
                missing,
            )
        apart = [place for place in apart if place not in missing]
        if apart:
            equal_before = not self._apart(then[:, apart])
            then_too = "they were equal" if equal_before else "they differed already"
            yield self._finding(
                "GG811",
                f"The gradients of {len(apart)} of {len(self._names)} parameters differ between the ranks just before "
                f"step() ({self._listed(apart)}); after backward() {then_too}; {_odd_ranks(now, apart)}.",
                "changed_after" if equal_before else "not_reduced",
                apart,
            )

    def _judge_batch(self, batches: Tensor) -> None:
        same = bool((batches == batches[0]).all()) and int(batches[0]) != 0
        self._same_batches = self._same_batches + 1 if same else 0
        if self._same_batches >= _SAME_DATA:
            self._due.append(
                self._finding(
                    "GG813",
                    f"In {self._same_batches} compared steps in a row, all {len(batches)} ranks called the model with "
                    f"equal inputs.",
                    "no_sampler",
                    [],
                )
            )

    def _listed(self, places: list[int]) -> str:
        return listed([self._names[place] for place in places])

    def _finding(self, code: str, seen: str, likely: str, places: list[int]) -> Finding:
        return finding(
            code,
            seen,
            likely=[likely],
            step=self.watch.step,
            moment=Moment.AFTER_STEP if code == "GG810" else Moment.BEFORE_STEP,
            parameter=self._names[places[0]] if places else None,
            evidence={"parameters": [self._names[place] for place in places[:50]], "ranks": self._ranks},
            guard=self.name,
        )

    def blind_spots(self) -> Iterable[str]:
        if self._only and not self._names and not self._sharded:
            yield f"replicas: no parameter of the model matches only={list(self._only)}"
        if self._ranks == 1:
            yield "replicas: this process group has one rank, or torch.distributed is not initialised"
        elif self._sharded:
            yield f"{listed(self._sharded)}: sharded, so no replica of the other ranks'"

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported = set(state["said"])


def _odd_ranks(values: Tensor, places: list[int]) -> str:
    """Which ranks differ from most of them in the first of these places."""
    column = values[:, places[0]].tolist()
    usual = max(set(column), key=column.count)
    odd = [rank for rank, value in enumerate(column) if value != usual]
    if column.count(usual) == 1:
        return "no two ranks agree" if len(column) > 2 else "the two ranks disagree"
    return f"rank {', '.join(map(str, odd))} differs from the others"


def checksum(tensor: Tensor) -> Tensor:
    """An integer scalar on the tensor's device that is equal for equal bits, and feels the order of elements.

    A sum of bit patterns, each multiplied by a number of its own, wraps around without rounding: the order in which a
    device adds does not change it. Stays on the device; a change detector, no protection against intent.
    """
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.to_dense()
    bits = bits_of(values).flatten()
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    # An odd multiplier keeps every bit; without it, swapped elements of one difference could cancel.
    return (bits * (place * 0x9E3779B1 | 1)).sum()
