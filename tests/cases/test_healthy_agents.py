"""Healthy agents, twins and loops with odd steps stay silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import adam, mlp, update

STEPS = 60
Guarded = Callable[..., Any]


def test_actor_and_critic(guarded: Guarded) -> None:
    model = nn.ModuleDict({"body": mlp(3, 32, 32), "policy": nn.Linear(32, 2), "value": nn.Linear(32, 1)})
    optimizer = adam(model)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            state = torch.randn(64, 3)
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=model["policy"](model["body"](state))).sample()
            reward = (action == (state[:, 0] > 0).long()).float()
            hidden = model["body"](state)
            choices = torch.distributions.Categorical(logits=model["policy"](hidden))
            value = model["value"](hidden).squeeze(1)
            advantage = (reward - value).detach()
            loss = -(choices.log_prob(action) * advantage).mean() - 0.01 * choices.entropy().mean()
            update(optimizer, loss + 0.5 * F.mse_loss(value, reward))


def test_value_learning_with_a_target_network(guarded: Guarded) -> None:
    model = mlp(4, 32, 2)
    target = copy.deepcopy(model)
    optimizer = adam(model, 1e-3)
    with guarded(model, optimizer):
        for step in range(STEPS):
            state, action = torch.randn(64, 4), torch.randint(2, (64, 1))
            with torch.no_grad():
                model(state[:1]).argmax()
                goal = state[:, :1] + 0.9 * target(state + 0.1).max(1, keepdim=True).values
            optimizer.zero_grad()
            F.smooth_l1_loss(model(state).gather(1, action), goal).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.data.clamp_(-1, 1)
            optimizer.step()
            if step % 20 == 19:
                target.load_state_dict(model.state_dict())


def test_siamese_contrast_with_a_temperature(guarded: Guarded) -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.temperature = mlp(8, 32, 8), nn.Parameter(torch.tensor(2.0))

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            first, second = F.normalize(self.body(one), dim=1), F.normalize(self.body(other), dim=1)
            scores: Tensor = first @ second.T * self.temperature.exp()
            return scores

    model = Siamese()
    optimizer = adam(model)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(16, 8)
            scores = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
            update(optimizer, F.cross_entropy(scores, torch.arange(16)))


def test_a_penalty_on_the_slope(guarded: Guarded) -> None:
    model = mlp(2, 32, 1, activation=nn.SiLU)
    optimizer = adam(model)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(32, 2).requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            update(
                optimizer, (y - x.detach().sum(1, keepdim=True)).pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()
            )


def test_sharpness_aware_steps(guarded: Guarded) -> None:
    """Two backward calls per step, the weights moved in between and back."""
    model = mlp(4, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(32, 4)
            y = x[:, :3].argmax(1)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            moves = [0.05 * grad / norm for grad in grads]
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.sub_(move)
            optimizer.step()


def test_stochastic_depth_and_normalised_weights(guarded: Guarded) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(4))
            self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if not self.training or torch.rand(()) > 0.2:
                    x = x + torch.tanh(block(x))
            output: Tensor = self.head(x)
            return output

    model = Deep()
    optimizer = adam(model)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(32, 8)
            update(optimizer, F.mse_loss(model(x), x[:, :2]))


def test_double_precision_and_a_wrapper_of_the_model(guarded: Guarded) -> None:
    class Parallel(nn.Module):
        """Wraps as DistributedDataParallel does."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*inputs, **kwargs)

    model = mlp(4, 32, 1).double()
    wrapped = Parallel(model)
    for watched in (model, wrapped):
        optimizer = adam(watched)
        with guarded(watched, optimizer):
            for _ in range(STEPS):
                x = torch.randn(32, 4, dtype=torch.float64)
                update(optimizer, F.mse_loss(wrapped(x), x.sum(1, keepdim=True)))
