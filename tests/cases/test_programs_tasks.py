"""Programs with several tasks, inner steps or optimizers train under every default guard without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from .conftest import Guarded
from .parts import mlp, update
from .programs import STEPS, learned


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
