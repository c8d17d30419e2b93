"""Known errors that it takes two processes to show; each rank runs the same function. Started by worker.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt_guard.callbacks.distributed.replicas import ReplicaSync
from gpt_guard.records import Finding

from .parts import known, not_found, sgd, watched

WIDTH, ROWS, STEPS = 4, 6, 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))


def batches() -> list[Tensor]:
    """Of this rank, and of no other."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x[:, :2]).square().mean()
    return loss


def lost_in_transfer(tensor: Tensor) -> None:
    """What a broken link between two devices delivers: the first half is missing."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            tensor[: len(tensor) // 2] = 0


def train(model: nn.Module, **options: Any) -> list[Finding]:
    optimizer = sgd(model)

    def loop() -> None:
        for x in batches():
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

    return watched(model, optimizer, loop, [ReplicaSync(**options)])


@known(
    "baichuan2-86",
    "A broken link between devices loses a part of the weights on their way to the second one",
    code="GG810",
    guard="ReplicaSync",
    step=0,
    place="module.0.weight",
    ranks=True,
)
def weights_lost(broken: bool) -> list[Finding]:
    model = DistributedDataParallel(net())
    if broken:
        lost_in_transfer(model.module[0].weight)
    return train(model)


@known(
    "pytorch-84803",
    "A broken link loses what all_reduce brings back: one rank applies another gradient than the others",
    code="GG811",
    guard="ReplicaSync",
    step=1,
    begins=1,
    place="module.0.weight",
    ranks=True,
)
def reduced_gradients_lost(broken: bool) -> list[Finding]:
    model = DistributedDataParallel(net())
    calls = [0]

    def reduce(_: Any, bucket: Any) -> Any:
        calls[0] += 1
        average = bucket.buffer() / dist.get_world_size()

        def arrived(done: Any) -> Tensor:
            brought: Tensor = done.value()[0]
            if broken and calls[0] > 1:
                lost_in_transfer(brought)
            return brought

        return dist.all_reduce(average, async_op=True).get_future().then(arrived)

    # torch compares annotations as objects, and ours are text.
    reduce.__annotations__.clear()
    model.register_comm_hook(None, reduce)
    return train(model)


@known(
    "pytorch-96600",
    "The link fails once, in a step that is not compared: from then on the replicas differ",
    code="GG810",
    guard="ReplicaSync",
    step=6,
    begins=4,
    place="0.weight",
    ranks=True,
)
def lost_once(broken: bool) -> list[Finding]:
    model = net()
    optimizer = sgd(model)

    def loop() -> None:
        for turn, x in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            if broken and turn == 4:
                gradient = model.get_parameter("0.weight").grad
                assert gradient is not None
                lost_in_transfer(gradient)
            optimizer.step()

    return watched(model, optimizer, loop, [ReplicaSync(every=3)])


def moved(model: nn.Module) -> None:
    """To another kind of memory and back: torch then builds the parameters' gradient accumulators anew."""
    model.double()
    model.float()


@known(
    "pytorch-104336",
    "The model is moved and moved back after it was wrapped: its gradients are no longer averaged",
    code="GG811",
    guard="ReplicaSync",
    step=0,
    place="module.0.weight",
    ranks=True,
)
def moved_after_wrapping(broken: bool) -> list[Finding]:
    model: nn.Module = net()
    if not broken:
        moved(model)
    model = DistributedDataParallel(model)
    if broken:
        moved(model)
    return train(model)


@known(
    "x-jxmnop-ddp-out-of-sync",
    "The loop calls the wrapper in one step and the bare model in the next, whose gradients nobody averages",
    code="GG811",
    guard="ReplicaSync",
    step=1,
    begins=1,
    place="0.weight",
    ranks=True,
)
def wrapped_or_not(broken: bool) -> list[Finding]:
    bare = net()
    wrapped = DistributedDataParallel(bare)
    optimizer = sgd(bare)

    def loop() -> None:
        for turn, x in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(bare if broken and turn % 2 else wrapped, x).backward()
            optimizer.step()

    return watched(bare, optimizer, loop, [ReplicaSync()])


not_found(
    "deepspeed-5794",
    "Experts of a mixture get unequal numbers of tokens, and the ranks call all_to_all a different number of times",
    "The run hangs inside of the collective: no step ends, and what does not run cannot look. The time limit of the "
    "process group ends it; TORCH_DISTRIBUTED_DEBUG=DETAIL then names the collective that differs.",
)
