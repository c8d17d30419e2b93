"""A loop that catches the halt and goes on: the next bad step is stopped as the first one was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import FiniteGuard, Guardian, NonFiniteError

READS = pytest.mark.parametrize("reads", ["immediate", "per_step"])


class Fails(nn.Module):
    """Goes bad as it is told: in the forward, in the backward, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, how: str) -> Tensor:
        h = self.first(x)
        if how == "forward":
            h = h * float("nan")
        if how == "backward":
            h = (h * 0).sqrt()
        loss: Tensor = self.second(h).mean()
        return loss


def caught_in(plan: list[str], reads: Any, *, parts: bool = False) -> list[tuple[int, str]]:
    """Step and code of each halt in a loop that leaves out bad batches; every weight must stay finite."""
    model, caught = Fails(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads) as guardian:
        for place, how in enumerate(plan):
            optimizer.zero_grad()
            try:
                x = torch.randn(3, 4)
                (model.forward(x, how) if parts else model(x, how)).backward()
                if how == "step":
                    model.first.weight.grad = torch.full_like(model.first.weight, float("nan"))
                optimizer.step()
            except NonFiniteError as error:
                caught.append((place, error.finding.code))
    assert guardian.step == plan.count("good")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return caught


@READS
@pytest.mark.parametrize("parts", [False, True])
def test_every_bad_step_is_stopped(reads: Any, parts: bool) -> None:
    plan = ["good", "forward", "backward", "good", "backward", "backward", "forward", "forward", "good"]
    caught = caught_in(plan, reads, parts=parts)
    assert [place for place, _ in caught] == [1, 2, 4, 5, 6, 7]
    assert [code for _, code in caught] == ["GG101", "GG104", "GG104", "GG104", "GG101", "GG101"]


@READS
def test_so_is_one_after_a_halt_just_before_the_step(reads: Any) -> None:
    caught = caught_in(["good", "step", "backward", "step", "forward", "good"], reads)
    assert [place for place, _ in caught] == [1, 2, 3, 4]


@READS
def test_gradients_that_come_without_a_backward_are_looked_at_before_the_step(reads: Any) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads):
            for scale in (1.0, 0.0):
                loss = (model(torch.randn(3, 4)) * scale).square().sum().sqrt()
                model.weight.grad = torch.autograd.grad(loss, [model.weight])[0]
                optimizer.step()

    with pytest.raises(NonFiniteError, match=r"has not called\s+backward") as stopped:
        loop()
    assert stopped.value.finding.parameter == "weight"
    assert stopped.value.finding.origin == "Code before step() made it."
    assert bool(model.weight.isfinite().all())
