"""Programs that fit functions, series and several tasks train under every default guard without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
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


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU())
        self.heads = nn.ModuleDict({"size": nn.Linear(32, 1), "kind": nn.Linear(32, 3), "flag": nn.Linear(32, 1)})
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {name: head(hidden) for name, head in self.heads.items()}


@pytest.mark.parametrize("weighing", ["by hand", "learned"])
def test_several_tasks(guarded: Guarded, weighing: str) -> None:
    model = Tasks()
    if weighing == "by hand":
        model.log_variances.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    with guarded(model, optimizer) as guardian:
        for _ in range(STEPS):
            x = torch.randn(32, 8)
            output = model(x)
            parts = torch.stack(
                [
                    F.mse_loss(output["size"].squeeze(1), x[:, :4].sum(1)),
                    F.cross_entropy(output["kind"], x[:, 4:7].argmax(1)),
                    F.binary_cross_entropy_with_logits(output["flag"].squeeze(1), (x[:, 7] > 0).float()),
                ]
            )
            if weighing == "by hand":
                loss = (parts * torch.tensor([0.3, 1.0, 0.5])).sum()
            else:
                loss = (parts * (-model.log_variances).exp() + model.log_variances).sum()
            update(optimizer, loss)
            guardian.log(size=parts[0].item(), kind=parts[1].item())
            losses.append(parts.sum().item())
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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_differential_equation(guarded: Guarded, checkpointed: bool) -> None:
    """One net called again and again, four times to each step of time."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(2, 32, 2, activation=nn.Tanh)

        def slope(self, x: Tensor) -> Tensor:
            slope: Tensor = checkpoint(self.net, x, use_reentrant=False) if checkpointed else self.net(x)
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


def test_a_start_from_which_tasks_are_learned_fast(guarded: Guarded) -> None:
    """Inner steps on copies of the weights, the outer loss back through them; one backward to a task."""
    model = mlp(1, 24, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []

    def sine() -> Callable[[], tuple[Tensor, Tensor]]:
        height, phase = 0.5 + torch.rand(()), 0.5 * torch.rand(())

        def draw() -> tuple[Tensor, Tensor]:
            x = 4 * torch.rand(10, 1) - 2
            return x, height * torch.sin(x * 1.5 + phase)

        return draw

    with guarded(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(2):
                draw = sine()
                weights: dict[str, Any] = dict(model.named_parameters())
                x, y = draw()
                loss = F.mse_loss(functional_call(model, weights, (x,)), y)
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
                x, y = draw()
                outer = F.mse_loss(functional_call(model, weights, (x,)), y) / 2
                outer.backward()
                total += outer.item()
            optimizer.step()
            losses.append(total)
    learned(losses)


class SharpnessAware(torch.optim.Optimizer):
    """A usual optimizer that is stepped with the gradient a little uphill."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["moved"] = p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12))
            p.add_(self.state[p]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "moved" in self.state[p]:
                    p.sub_(self.state[p]["moved"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            self.first_step()
            closure()
        self.second_step()


@pytest.mark.parametrize("by_closure", [False, True])
def test_a_step_from_the_gradient_uphill(guarded: Guarded, by_closure: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    losses = []
    # The one that steps: step() of the other is called with a closure only.
    with guarded(model, optimizer if by_closure else optimizer.base_optimizer):
        for _ in range(STEPS):
            x = torch.randn(32, 6)
            y = x[:, :3].argmax(1)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if by_closure:
                optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y).backward())
            else:
                optimizer.first_step()
                F.cross_entropy(model(x), y).backward()
                optimizer.second_step()
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


def test_clicks_of_people_on_things(guarded: Guarded) -> None:
    """Sparse tables with an optimizer of their own, dense layers with another, one loss, negatives drawn."""

    class Matches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.people, self.things = nn.Embedding(50, 8, sparse=True), nn.Embedding(40, 8, sparse=True)
            self.bias, self.top = nn.Parameter(torch.zeros(1)), mlp(16, 16, 1)

        def forward(self, people: Tensor, things: Tensor) -> Tensor:
            a, b = self.people(people), self.things(things)
            scores: Tensor = (a * b).sum(-1) + self.top(torch.cat([a, b], -1)).squeeze(-1) + self.bias
            return scores

    model = Matches()
    tables = [*model.people.parameters(), *model.things.parameters()]
    optimizers: list[Any] = [
        torch.optim.SparseAdam(tables, lr=2e-2),
        torch.optim.Adam([model.bias, *model.top.parameters()], lr=5e-3),
    ]
    losses = []
    with guarded(model, optimizers):
        for _ in range(STEPS):
            people = torch.randint(50, (64,))
            things = torch.randint(40, (64,))
            clicked = (people % 4 == things % 4).float()
            loss = F.binary_cross_entropy_with_logits(model(people, things), clicked)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
    learned(losses)
