"""What is said of a fault in a light step: the place is that of a full step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Guardian, NonFiniteError
from gpt_guard.hooks.pace import Pace

FAULT = Pace.first + 4


class Reads(nn.Module):
    """Its own code stands between the call of the model and that of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        output: Tensor = self.head(inner)
        return output


def train_on_a_bad_batch(model: nn.Module, optimizer: torch.optim.Optimizer, guardian: Guardian) -> None:
    for step in range(FAULT + 1):
        x = torch.rand(8, 4)
        if step == FAULT:
            assert guardian._session is not None
            assert not guardian._session.watch.pace.full
            x[3, 2] = math.nan
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()


def train_with_a_bad_second_backward(model: Reads, optimizer: torch.optim.Optimizer, *, clip: bool) -> None:
    for step in range(FAULT + 1):
        optimizer.zero_grad()
        model(torch.rand(8, 4)).pow(2).mean().backward()
        if step == FAULT:
            model.inner.weight.register_hook(lambda grad: grad * math.nan)
            model(torch.rand(8, 4)).pow(2).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def watched() -> tuple[Reads, torch.optim.Optimizer, Guardian]:
    torch.manual_seed(0)
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, Guardian(model, optimizer, sinks=[])


def test_a_bad_batch_is_told_at_the_line_that_calls_the_model() -> None:
    model, optimizer, guardian = watched()
    with pytest.raises(NonFiniteError) as caught, guardian:
        train_on_a_bad_batch(model, optimizer, guardian)
    found = caught.value.finding
    assert found.code == "GG103"
    assert found.where is not None
    assert found.where.text == "loss = model(x).pow(2).mean()"


@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_of_a_second_backward_is_told_of_the_second(clip: bool) -> None:
    model, optimizer, guardian = watched()
    with pytest.raises(NonFiniteError) as caught, guardian:
        train_with_a_bad_second_backward(model, optimizer, clip=clip)
    assert caught.value.finding.parameter == "inner.weight"
    assert caught.value.finding.micro_batch == 1


def test_who_asks_after_a_backward_hears_of_its_gradients() -> None:
    model, optimizer, guardian = watched()
    with pytest.raises(NonFiniteError) as caught, guardian:
        train_and_ask(model, optimizer, guardian)
    found = caught.value.finding
    assert (found.code, found.parameter) == ("GG104", "inner.weight")
    assert found.where is not None
    # The replay of the backward has found more than the line that called it.
    assert "grad * math.nan" in found.where.text
    assert torch.isfinite(model.inner.weight).all()


def train_and_ask(model: Reads, optimizer: torch.optim.Optimizer, guardian: Guardian) -> None:
    for step in range(FAULT + 1):
        optimizer.zero_grad()
        if step == FAULT:
            model.inner.weight.register_hook(lambda grad: grad * math.nan)
        model(torch.rand(8, 4)).pow(2).mean().backward()
        if step == FAULT:
            assert guardian.findings is None, "the question was to halt the run"
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
