"""Recomputed: activation checkpointing whose recomputation draws other random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt_guard import Guardian, Recomputed
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.records import Finding, Severity

WIDTH = 8
Again = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.layer(x)), self.p, self.training)


class LayerDrop(Block):
    """Leaves itself out now and then, by Python's own generator; the graph has the same form either way."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(random.random() < 0.5) * torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self, again: Again, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 2)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.again(block, x)
        out: Tensor = self.head(x)
        return out


def kept(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def redrawn(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def reentrant(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)


class _Own(torch.autograd.Function):
    """A checkpoint of somebody's own, which forgets the generator."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        wanted = [x, *ctx.block.parameters()]
        return (None, *torch.autograd.grad(out, wanted, grads[0]))


def own(block: nn.Module, x: Tensor) -> Any:
    return _Own.apply(block, x, *block.parameters())  # type: ignore[no-untyped-call]  # torch has no types for it


def run(again: Again, *blocks: nn.Module, steps: int = 4, micro: int = 1, guards: Any = None) -> list[Finding]:
    torch.manual_seed(0)
    model = Net(again, list(blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=guards or [Recomputed()], sinks=[]) as guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro):
                x = torch.randn(16, WIDTH, requires_grad=True)
                (F.cross_entropy(model(x), (x.sum(1) > 0).long()) / micro).backward()
            optimizer.step()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return list(guardian.findings)


@pytest.mark.parametrize("again", [redrawn, reentrant, own])
@pytest.mark.parametrize("micro", [1, 2])
def test_other_masks_are_told_at_the_first_step_with_the_outermost_modules(again: Again, micro: int) -> None:
    (found,) = run(again, Block(0.3), Block(0.0), Block(0.3), micro=micro)
    assert (found.code, found.step, found.module, found.module_class) == ("GG509", 0, "blocks.0", "Block")
    assert found.severity is Severity.ERROR
    assert found.evidence["modules"] == ["blocks.0", "blocks.2"]
    assert "preserve_rng_state=False" in found.causes[0]


def test_a_layer_left_out_by_pythons_generator() -> None:
    (found,) = run(kept, LayerDrop(0.0), Block(0.3))
    assert (found.code, found.module, found.severity) == ("GG509", "blocks.0", Severity.WARNING)
    assert "random" in found.causes[0]


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: run(kept, Block(0.3), Block(0.3)),
        lambda: run(kept, Block(0.3), Block(0.3), micro=3),
        lambda: run(lambda block, x: checkpoint(block, x, use_reentrant=True), Block(0.3)),
        lambda: run(redrawn, Block(0.0), Block(0.0)),
        lambda: run(redrawn, Block(0.3).eval(), Block(0.0)),
        lambda: run(lambda block, x: block(x), Block(0.3), LayerDrop(0.0)),
        lambda: run(kept, *[Block(0.3)] * 3),
    ],
)
def test_what_is_computed_again_alike_is_silent(healthy: Callable[[], list[Finding]]) -> None:
    assert healthy() == []


def test_the_default_guards_have_it() -> None:
    found = run(redrawn, Block(0.3), guards=default_guards())
    assert "GG509" in {each.code for each in found}
