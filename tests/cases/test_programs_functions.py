"""Programs that fit functions, series and several tasks train under every default guard without a word."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .conftest import Guarded
from .parts import mlp, update
from .programs import STEPS, learned


class Waves(nn.Module):
    """Two LSTM cells that predict the next value of a wave, and go on alone where they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LSTMCell(1, 12), nn.LSTMCell(12, 12), nn.Linear(12, 1)

    def forward(self, waves: Tensor, future: int = 0) -> Tensor:
        first: Any = None
        second: Any = None
        outputs: list[Tensor] = []
        for moment in [*waves.split(1, dim=1), *[None] * future]:
            first = self.first(outputs[-1] if moment is None else moment, first)
            second = self.second(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def test_waves_by_lbfgs(guarded: Guarded) -> None:
    """The same series in each closure, several closures to a step; validation that looks into the future."""
    start = torch.randint(-20, 20, (12, 1))
    data = torch.sin((start + torch.arange(16)) / 3.0).double()
    model = Waves().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(data[3:, :-1]), data[3:, 1:])
        loss.backward()
        return loss

    with guarded(model, optimizer):
        for _ in range(12):
            losses.append(float(optimizer.step(closure).detach()))
            with torch.no_grad():
                criterion(model(data[:3, :-1], future=4)[:, :-4], data[:3, 1:])
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("scaled", [True, False], ids=["standardised", "as measured"])
def test_quantities_with_units(guarded: Guarded, scaled: bool) -> None:
    """Pressures of 1e5 and lengths of 1e-3: standardised, or with a layer that does it inside of the model."""
    raw = torch.randn(256, 3) * torch.tensor([1e4, 1e-3, 20.0]) + torch.tensor([1e5, 5e-3, 300.0])
    wanted = (raw[:, :1] / 1e5 + raw[:, 1:2] / 5e-3) * 8.3 * raw[:, 2:] / 300
    body = mlp(3, 32, 32, 1)
    model = body if scaled else nn.Sequential(nn.BatchNorm1d(3, affine=False), body)
    x = (raw - raw.mean(0)) / raw.std(0) if scaled else raw
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    losses = []
    with guarded(model, optimizer, scheduler=scheduler):
        for step in range(STEPS):
            rows = torch.randint(256, (32,))
            loss = F.huber_loss(model(x[rows]), wanted[rows])
            update(optimizer, loss)
            losses.append(loss.item())
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    scheduler.step(F.l1_loss(model(x), wanted))
                model.train()
    learned(losses)


def test_a_picture_as_a_function_of_place(guarded: Guarded) -> None:
    """Places turned into sines of many speeds; a density and a colour, summed along rays."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.density, self.colour = mlp(2 + 16, 48, 48), nn.Linear(48, 1), nn.Linear(48, 3)

        def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
            turned = (places[..., None] * 2.0 ** torch.arange(4)).flatten(-2)
            hidden = F.relu(self.net(torch.cat([places, turned.sin(), turned.cos()], -1)))
            return F.relu(self.density(hidden)).squeeze(-1), self.colour(hidden).sigmoid()

    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    losses = []
    with guarded(model, optimizer, scheduler=scheduler):
        for _ in range(STEPS):
            height = 2 * torch.rand(64) - 1
            depth = torch.linspace(0, 1, 8) + torch.rand(64, 8) / 8
            density, colour = model(torch.stack([depth, height[:, None].expand(-1, 8)], -1))
            opaque = 1 - torch.exp(-density * 0.5)
            left = torch.cumprod(torch.cat([torch.ones(64, 1), 1 - opaque[:, :-1] + 1e-10], 1), 1)
            seen = ((left * opaque)[..., None] * colour).sum(1)
            wanted = torch.stack([(3 * height).sin(), (5 * height).cos(), height], 1) * 0.4 + 0.5
            loss = F.mse_loss(seen, wanted)
            update(optimizer, loss)
            scheduler.step()
            losses.append(loss.item())
    learned(losses)


def test_a_differential_equation(guarded: Guarded) -> None:
    """One net called again and again, four times to each step of time, and once more in the backward."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(2, 32, 2, activation=nn.Tanh)

        def slope(self, x: Tensor) -> Tensor:
            slope: Tensor = checkpoint(self.net, x, use_reentrant=False)
            return slope

        def forward(self, x: Tensor, steps: int, width: float = 0.2) -> Tensor:
            found = [x]
            for _ in range(steps):
                a = self.slope(x)
                b = self.slope(x + width / 2 * a)
                c = self.slope(x + width / 2 * b)
                d = self.slope(x + width * c)
                x = x + width / 6 * (a + 2 * b + 2 * c + d)
                found.append(x)
            return torch.stack(found)

    turn = torch.linalg.matrix_exp(0.2 * torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])).T
    model = Flow()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(16, 2)
            path = [x]
            for _ in range(3):
                path.append(path[-1] @ turn)
            loss = (model(x, 3) - torch.stack(path)).abs().mean()
            update(optimizer, loss)
            losses.append(loss.item())
    learned(losses)


def test_a_network_that_solves_an_equation(guarded: Guarded) -> None:
    """The residual of u'' = -u at random places and u(0) = 0, u'(0) = 1: there is no data."""
    model = mlp(1, 24, 24, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x = (math.pi * torch.rand(48, 1)).requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
            (bend,) = torch.autograd.grad(slope, x, torch.ones_like(slope), create_graph=True)
            zero = torch.zeros(1, 1, requires_grad=True)
            start = model(zero)
            (first,) = torch.autograd.grad(start.sum(), zero, create_graph=True)
            loss = (bend + u).pow(2).mean() + start.pow(2).mean() + (first - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    learned(losses)
