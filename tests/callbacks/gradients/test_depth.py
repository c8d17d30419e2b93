"""Gradients over depth: deep saturating stacks are told, residual and zero-initialised ones are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

WIDTH = 16


class Residual(nn.Module):
    def __init__(self, depth: int, *, zero: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.out = nn.Linear(WIDTH, 1)
        for block in self.blocks if zero else ():
            nn.init.zeros_(block[3].weight)  # type: ignore[index]  # a Sequential

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.out(x)
        return result


class Sine(nn.Module):
    """Bounded forward, steep derivative: gradients grow with every layer they pass."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(20.0 * x)


def plain(depth: int, activation: type[nn.Module]) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), activation())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def watch(model: nn.Module, steps: int = 8, *, lr: float = 1e-4, **limits: float) -> list[Finding]:
    optimizer = SGD(model.parameters(), lr=lr)
    guards = [GradNormMonitor(**limits)]  # type: ignore[arg-type]  # limits of depth only
    with Guardian(model, optimizer, guards=guards, summary=False, sinks=[]) as guardian:
        for _ in range(steps):
            x = torch.randn(32, WIDTH)
            optimizer.zero_grad()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return list(guardian.findings)


def test_a_deep_sigmoid_stack_is_told() -> None:
    (finding,) = watch(plain(12, nn.Sigmoid))
    assert (finding.code, finding.step, finding.module) == ("GG205", 4, "")
    assert "smaller" in finding.seen
    assert finding.seen.endswith("median ratio of the first 5 steps).")
    (in_one,) = watch(plain(12, nn.Sigmoid), depth_steps=1)
    assert in_one.seen.endswith("per weight (root mean square, in one step).")
    assert finding.evidence["ratio"] < 1e-4  # type: ignore[operator]  # a float
    profile = finding.evidence["per_weight"]
    assert isinstance(profile, dict)
    assert list(profile) == [str(2 * place) for place in range(13)]
    assert "saturat" in finding.causes[0] or "sigmoid" in finding.causes[0]


def test_a_stack_that_grows_towards_the_input_is_told() -> None:
    (finding,) = watch(plain(10, Sine), lr=1e-12)
    assert finding.code == "GG205"
    assert "larger" in finding.seen
    assert "Growing" in finding.causes[0]


@pytest.mark.parametrize("zero", [False, True])
def test_residual_blocks_are_quiet(zero: bool) -> None:
    assert watch(Residual(12, zero=zero)) == []


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
def test_stacks_of_usual_depth_are_quiet(activation: type[nn.Module]) -> None:
    assert watch(plain(5, activation)) == []


def test_frozen_blocks_are_left_out_of_the_comparison() -> None:
    model = plain(12, nn.Sigmoid)
    for layer in list(model)[:-7]:
        layer.requires_grad_(False)
    assert watch(model) == []


def test_the_limit_can_be_set_or_switched_off() -> None:
    assert watch(plain(12, nn.Sigmoid), depth_limit=0.0) == []
    (finding,) = watch(plain(5, nn.Sigmoid), depth_limit=0.5, depth_steps=2)
    assert (finding.code, finding.step) == ("GG205", 1)
