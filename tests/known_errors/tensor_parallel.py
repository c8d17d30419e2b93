"""A known error of tensor parallelism: two ranks that hold parts of the layers, and the norms in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpt_guard.callbacks.distributed.replicas import ReplicaSync
from gpt_guard.records import Finding

from .parts import known, sgd, watched
from .ranks import ROWS, STEPS, WIDTH, loss_of


class IntoRegion(torch.autograd.Function):
    """Enters the part that is split over the ranks: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class OutOfRegion(torch.autograd.Function):
    """Leaves it: the output is the sum of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Split(nn.Module):
    """A norm that every rank holds, and two layers of which each rank holds a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        torch.manual_seed(1 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = IntoRegion.apply(self.norm(x))  # type: ignore[no-untyped-call]  # torch has no types for it
        out: Tensor = OutOfRegion.apply(self.down(self.up(inside).tanh()))  # type: ignore[no-untyped-call]  # as above
        return out


def clip(model: Split, limit: float, everywhere: bool) -> None:
    """Clip by the norm over all ranks; what is held in common counts once, and has to be clipped everywhere."""
    first = dist.get_rank() == 0
    common = set(model.norm.parameters())
    counted = [each for each in model.parameters() if first or each not in common]
    square = torch.stack([each.grad.square().sum() for each in counted if each.grad is not None]).sum()
    dist.all_reduce(square)
    factor = (limit / square.sqrt()).clamp(max=1.0)
    for each in model.parameters() if everywhere else counted:
        if each.grad is not None:
            each.grad *= factor


@known(
    "deepspeed-1801",
    "Clipping leaves out, on all tensor-parallel ranks but the first, the norm layers that they hold in common",
    code="GG811",
    guard="ReplicaSync",
    step=0,
    place="norm.weight",
    ranks=True,
)
def clipped_on_one_rank(broken: bool) -> list[Finding]:
    model = Split()
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(0)

    def loop() -> None:
        for _ in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            optimizer.zero_grad()
            loss_of(model, x).backward()
            clip(model, 0.05, everywhere=not broken)
            optimizer.step()

    return watched(model, optimizer, loop, [ReplicaSync(only=["norm.*"])])
