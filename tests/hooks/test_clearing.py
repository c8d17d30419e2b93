"""Gradients that are not cleared between steps are found by every order of calls, and accumulation is not mistaken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import GradNormMonitor, Guardian

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def _loss(model: nn.Module) -> Tensor:
    x = torch.randn(8, 4)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def _missing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        _loss(model).backward()
        optimizer.step()


def _missing_with_clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        _loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _other_model_cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = nn.Linear(4, 1)
    for _ in range(5):
        other.zero_grad()
        _loss(model).backward()
        optimizer.step()


def _before_forward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()


def _set_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        loss = _loss(model)
        model.zero_grad()
        loss.backward()
        optimizer.step()


def _accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(3):
            (_loss(model) / 3).backward()
        optimizer.step()


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def evaluate() -> float:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss.item()

    for _ in range(5):
        optimizer.step(evaluate)


def _codes(loop: Loop, reads: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, reads=reads) as guardian:  # type: ignore[arg-type]  # parametrized
        loop(model, optimizer)
    return [finding.code for finding in guardian.findings]


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("loop", [_missing, _missing_with_clipping, _other_model_cleared])
def test_fires_where_nothing_clears_the_gradients(loop: Loop, reads: str) -> None:
    assert _codes(loop, reads) == ["GG209"]


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("loop", [_before_forward, _set_to_zero, _by_model, _accumulating, _closure])
def test_is_silent_where_something_clears_them(loop: Loop, reads: str) -> None:
    assert _codes(loop, reads) == []


def test_names_the_step_at_which_it_began() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False) as guardian:
        _before_forward(model, optimizer)
        _missing(model, optimizer)
    (finding,) = guardian.findings
    assert finding.evidence["first_step"] == 5


def test_two_optimizers_of_a_gan_in_one_guardian_are_followed_apart() -> None:
    gan = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    g_opt = torch.optim.SGD(gan["g"].parameters(), lr=0.01)
    d_opt = torch.optim.SGD(gan["d"].parameters(), lr=0.01)
    with Guardian(gan, [g_opt, d_opt], guards=[GradNormMonitor()], summary=False) as guardian:
        for _ in range(6):
            noise = torch.randn(8, 4)
            d_opt.zero_grad()
            (gan["d"](noise).mean() - gan["d"](gan["g"](noise).detach()).mean()).backward()
            d_opt.step()
            g_opt.zero_grad()
            gan["d"](gan["g"](noise)).mean().backward()
            g_opt.step()
    assert [finding.code for finding in guardian.findings] == []
