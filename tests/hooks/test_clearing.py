"""Gradients that are not cleared between steps are found by every order of calls, and accumulation is not mistaken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import GradNormMonitor, Guardian
from gpt_guard.hooks.clearing import Clearing

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def _loss(model: nn.Module) -> Tensor:
    x = torch.randn(8, 4)
    loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


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


def _behind_the_counter(write: Callable[[Tensor], object]) -> Loop:
    """Clear by writing zeros in a way that no version counter shows."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(12):
            _loss(model).backward()
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                write(parameter.grad)

    return run


def _assigned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(8):
        parameters = list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(_loss(model), parameters), strict=True):
            parameter.grad = grad
        optimizer.step()


def _copied_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(8):
        parameters = list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(_loss(model), parameters), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(grad)
        optimizer.step()


def _replaced_after_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(8):
        parameters = list(model.parameters())
        loss = _loss(model)
        loss.backward(retain_graph=True)
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()


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
@pytest.mark.parametrize(
    "loop",
    [
        _before_forward,
        _set_to_zero,
        _by_model,
        _accumulating,
        _closure,
        _behind_the_counter(lambda grad: grad.data.zero_()),
        _behind_the_counter(lambda grad: grad.data.fill_(0)),
        _behind_the_counter(lambda grad: grad.numpy().fill(0)),
        _assigned,
        _copied_in,
        _replaced_after_backward,
    ],
)
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


def test_values_are_looked_at_only_a_few_times() -> None:
    looks = 0

    def look() -> float:
        nonlocal looks
        looks += 1
        return 0.0

    clearing = Clearing([0, 1])
    state = [(1, 1), (2, 1)]
    for _ in range(50):
        clearing.backward_begins(state, look)
        clearing.backward_ended(state)
        clearing.step_begins(lambda: state)
        clearing.step_ended(state)
    assert 1 <= looks <= 4
