"""Work that is not the plain sequence: threads, and forwards that run again inside a backward."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_guard.guardian import Guardian


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(torch.randn(8, 6)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def test_two_threads_train_at_once() -> None:
    results: dict[int, Guardian] = {}
    gate = threading.Barrier(2)

    def train(number: int) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Guardian(model, optimizer, sinks=[]) as guardian:
            results[number] = guardian
            gate.wait()
            for _ in range(30):
                one_step(model, optimizer)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for guardian in results.values():
        assert guardian.step == 30
        assert guardian.latest is not None
        assert guardian.latest.micro_batches == 1
        assert guardian.latest.loss is not None
        assert not guardian.findings


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = mlp(), nn.Linear(3, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        result: Tensor = self.second(hidden)
        return result


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_one_forward_and_one_backward(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, sinks=[]) as guardian:
        for _ in range(3):
            loss = one_step(model, optimizer)
    assert guardian.latest is not None
    assert guardian.latest.micro_batches == 1
    assert guardian.latest.loss == pytest.approx(loss.item())
    assert guardian.latest.samples == 24
    assert not guardian.findings
