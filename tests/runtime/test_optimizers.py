"""Optimizers as people have them: several, wrapped, subclassed, or stepping inside of the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.guardian import Guardian
from gpt_guard.records import Observation


class Recorder:
    """Notes `guardian.latest` after each step of the loop."""

    def __init__(self, guardian: Guardian) -> None:
        self.guardian = guardian
        self.seen: list[Observation] = []

    def note(self) -> Observation:
        assert self.guardian.latest is not None
        self.seen.append(self.guardian.latest)
        return self.seen[-1]


class Accelerated(torch.optim.Optimizer):
    """Holds the optimizer it stands for, as accelerate's does; its own step is never hooked into anything."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Scheduled(torch.optim.SGD):
    """Does something of its own and calls the step of its base class, as many do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.9
        return super().step(closure)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(16, 4)
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


@pytest.fixture(params=["immediate", "per_step"])
def reads(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_each_of_several_has_the_loss_and_its_own_figures(reads: Any) -> None:
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.02)
    with Guardian(model, [first, second], sinks=[], reads=reads) as guardian:
        notes = Recorder(guardian)
        for _ in range(3):
            loss = loss_of(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            norms = [float(nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None]))
                     for part in (model[0], model[2])]  # fmt: skip
            first.step()
            one = notes.note()
            second.step()
            other = notes.note()
            for optimizer in (first, second):
                optimizer.zero_grad()
            for index, seen in enumerate((one, other)):
                assert seen.optimizer == index
                assert seen.loss == pytest.approx(loss.item())
                assert seen.micro_batches == 1
                assert seen.grad_norm_clipped == pytest.approx(norms[index], rel=1e-4)
                assert seen.clipped is True
            assert (one.lr, other.lr) == ((0.1,), (0.02,))
            assert (list(one.grad_norms), list(other.grad_norms)) == (["0.weight", "0.bias"], ["2.weight", "2.bias"])
    assert guardian.step == 3
    assert not guardian.findings


def test_step_times_are_those_between_steps_of_the_same_optimizer() -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[0], model[2])]
    with Guardian(model, optimizers, sinks=[]) as guardian:
        notes = Recorder(guardian)
        for _ in range(3):
            loss_of(model).backward()
            for optimizer in optimizers:
                optimizer.step()
                notes.note()
                optimizer.zero_grad()
    times = [seen.step_time or 0.0 for seen in notes.seen]
    # The second steps directly after the first; still its time is that of a whole turn of the loop.
    assert min(times[3::2]) > 0.2 * max(times[2::2])


def test_a_wrapper_that_is_an_optimizer_itself(reads: Any) -> None:
    model = mlp()
    optimizer = Accelerated(torch.optim.SGD(model.parameters(), lr=0.05))
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert guardian.step == 3
    assert not guardian.findings


def test_a_step_that_calls_the_step_of_its_base_is_one_step(reads: Any) -> None:
    model = mlp()
    # Once the base class has been used, its step runs hooks of its own.
    torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Scheduled(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
    assert guardian.step == 3
    assert guardian.latest is not None
    assert guardian.latest.loss == pytest.approx(loss.item())
    assert not guardian.findings


def test_a_step_that_fails_inside_does_not_hide_the_next(reads: Any) -> None:
    class Fragile(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise MemoryError("out of memory")
            return super().step(closure)

    model = mlp()
    optimizer = Fragile(model.parameters(), lr=0.05)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        loss_of(model).backward()
        with pytest.raises(MemoryError):
            optimizer.step()
        optimizer.fail = False
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert guardian.step == 2
    assert not guardian.findings


def test_steps_inside_of_the_backward(reads: Any) -> None:
    """One optimizer for each parameter, stepping as soon as its gradient is there: saves the memory of gradients."""
    model = mlp()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]  # the hook is given the parameter itself
        optimizers[parameter].zero_grad()  # type: ignore[index]

    handles = [parameter.register_post_accumulate_grad_hook(step_now) for parameter in optimizers]
    with Guardian(model, list(optimizers.values()), sinks=[], reads=reads) as guardian:
        for _ in range(4):
            loss_of(model).backward()
    for handle in handles:
        handle.remove()
    assert guardian.step == 4
    assert guardian.latest is not None
    assert guardian.latest.grad_norm is not None
    assert not [found for found in guardian.findings if found.severity != "info"]


def test_validation_between_forward_and_backward_costs_no_figure(reads: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            parts = []
            for _ in range(2):
                loss = loss_of(model)
                with guardian.evaluating():
                    loss_of(model)
                loss.backward()
                parts.append(loss.item())
                with torch.no_grad():
                    loss_of(model)
            optimizer.step()
    assert guardian.latest is not None
    assert guardian.latest.loss == pytest.approx(sum(parts))
    assert guardian.latest.micro_batches == 2


def test_under_anomaly_detection(reads: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.autograd.set_detect_anomaly(True), Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        loss_of(model).backward()
        optimizer.step()
    assert guardian.step == 1
