"""One rank of a data-parallel training on the CPU; prints, as JSON, what ReplicaSync found in each scenario.

Run by test_replicas.py: `python replica_worker.py RANK RANKS FILE [SCENARIO ...]`, one process for each rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt_guard import Guardian
from gpt_guard.callbacks.distributed.replicas import ReplicaSync

RANK = int(sys.argv[1])
SCENARIOS: dict[str, Callable[[], list[dict[str, Any]]]] = {}


def scenario(train: Callable[[], Guardian]) -> Callable[[], Guardian]:
    def run() -> list[dict[str, Any]]:
        guardian = train()
        return [json.loads(found.model_dump_json()) for found in guardian.findings]

    SCENARIOS[train.__name__] = run
    return train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)
        self.extra = nn.Linear(8, 2)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        hidden = self.first(x).tanh()
        out: Tensor = self.second(hidden)
        return out + self.extra(hidden) if extra else out


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(same: bool = False) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1 if same else RANK)
    while True:
        yield torch.randn(6, 4, generator=generator)


def loop(
    model: nn.Module, *, steps: int = 5, same: bool = False, change: Callable[[int], None] | None = None
) -> Guardian:
    """Train under ReplicaSync; `change` is called between backward and step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guardian = Guardian(model, optimizer, guards=[ReplicaSync(every=2)], sinks=[])
    batches = data(same)
    with guardian:
        for step in range(steps):
            optimizer.zero_grad()
            model(next(batches)).square().mean().backward()
            if change is not None:
                change(step)
            optimizer.step()
    return guardian


@scenario
def healthy() -> Guardian:
    return loop(DistributedDataParallel(make(RANK)))


@scenario
def clipped_the_same_way() -> Guardian:
    model = DistributedDataParallel(make())
    return loop(model, change=lambda step: void(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))


@scenario
def no_wrapper() -> Guardian:
    return loop(make())


@scenario
def other_seeds_and_no_wrapper() -> Guardian:
    return loop(make(RANK))


@scenario
def inner_module_called() -> Guardian:
    model = DistributedDataParallel(make())
    inner = model.module
    assert isinstance(inner, Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Guardian(inner, optimizer, guards=[ReplicaSync()], sinks=[]) as guardian:
        for batch, _ in zip(data(), range(3), strict=False):
            optimizer.zero_grad()
            inner(batch).square().mean().backward()
            optimizer.step()
    return guardian


@scenario
def last_micro_batch_not_synchronised() -> Guardian:
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = data()
    with Guardian(model, optimizer, guards=[ReplicaSync()], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            for micro_batch in range(2):
                with model.no_sync() if micro_batch == 1 else nullcontext():
                    model(next(batches)).square().mean().backward()
            optimizer.step()
    return guardian


@scenario
def clipped_by_rank() -> Guardian:
    model = DistributedDataParallel(make())

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if RANK == 1 else 1e3)

    return loop(model, change=clip)


@scenario
def optimizers_differ() -> Guardian:
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 * (1 + RANK))
    batches = data()
    with Guardian(model, optimizer, guards=[ReplicaSync()], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            model(next(batches)).square().mean().backward()
            optimizer.step()
    return guardian


@scenario
def branch_on_one_rank() -> Guardian:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = data()
    with Guardian(model, optimizer, guards=[ReplicaSync()], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            model(next(batches), extra=RANK == 0).square().mean().backward()
            for each in model.parameters():
                if each.grad is not None and each not in set(model.extra.parameters()):
                    dist.all_reduce(each.grad)
            optimizer.step()
    return guardian


@scenario
def same_data_everywhere() -> Guardian:
    return loop(DistributedDataParallel(make()), same=True)


def void(_: object) -> None:
    return None


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=int(sys.argv[2]))
    chosen = sys.argv[4:] or list(SCENARIOS)
    print(json.dumps({name: SCENARIOS[name]() for name in chosen}), flush=True)
    dist.destroy_process_group()
    # Threads of gloo may be at work still, and the interpreter's end would abort the process for it now and then.
    os._exit(0)


if __name__ == "__main__":
    main()
