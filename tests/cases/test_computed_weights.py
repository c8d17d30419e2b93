"""Models whose weights are computed, or exchanged for a call, are watched without a trace and without a word."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gpt_guard.guardian import Guardian

from .conftest import Guarded
from .parts import mlp

STEPS = 8


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_reading_a_weight_that_is_computed_would_take_a_step_of_its_own(reads: Any) -> None:
    """Spectral normalisation moves its vectors whenever the weight is asked for in training."""

    def trained(guarded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5))
        model = nn.Sequential(nn.Embedding(5, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), head)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        watched: Any = Guardian(model, optimizer, sinks=[], reads=reads) if guarded else nullcontext()
        with watched:
            for _ in range(STEPS):
                ids = torch.randint(5, (16,))
                optimizer.zero_grad()
                F.cross_entropy(model(ids), (ids + 1) % 5).backward()
                optimizer.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    for mine, bare in zip(trained(True), trained(False), strict=True):
        assert torch.equal(mine, bare)


def test_a_gradient_for_each_sample(guarded: Guarded) -> None:
    """As private training clips them: the model runs inside of vmap and grad, with weights that are handed to it."""
    model = mlp(4, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def error(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, weights, (x[None],)), y[None])

    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(16, 4)
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            each = vmap(grad(error), (None, 0, 0))(weights, x, x.sum(1, keepdim=True))
            norms = torch.stack([part.flatten(1).norm(dim=1) for part in each.values()]).norm(dim=0)
            share = (1 / norms).clamp(max=1.0)
            for name, parameter in model.named_parameters():
                parameter.grad = torch.einsum("b,b...->...", share, each[name]) / len(x)
            optimizer.step()
