"""Language models with adapters, with experts, or compiled train under every default guard without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .conftest import Guarded
from .programs import STEPS, characters, learned, windows
from .transformer import LENGTH, WIDTH, Block, Transformer


class Adapted(nn.Module):
    """A frozen layer with a detour of low rank whose second half starts at zero."""

    def __init__(self, base: Any, rank: int = 4, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.lora_dropout = nn.Dropout(0.05)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.scaling * self.lora_B(self.lora_A(self.lora_dropout(x)))
        return output


@pytest.mark.parametrize("prompted", [False, True], ids=["all tokens", "answers alone"])
def test_low_rank_adapters_on_a_trained_model(guarded: Guarded, prompted: bool) -> None:
    """Trained on characters, tuned on a text that says everything in small steps upwards."""
    ids, vocabulary = characters()
    model = Transformer(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(*windows(ids, 8, LENGTH)).loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    for block in model.h:
        assert isinstance(block, Block)
        mlp: Any = block.mlp
        block.c_attn, mlp[0] = Adapted(block.c_attn), Adapted(mlp[0])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            batch = (torch.randint(20, (8, 1)) + torch.arange(LENGTH + 1)) % 20
            targets = batch[:, 1:].clone()
            if prompted:
                targets[:, :5] = -1
            loss = model(batch[:, :-1], targets).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.9)


class Experts(nn.Module):
    """Each token goes to the two experts that its router prefers; some get none. Keeps the loss that spreads them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )
        self.spread = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                output.index_add_(0, rows, weights[rows, places, None] * expert(flat[rows]))
        used = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        self.spread = len(self.experts) * (used * chances.mean(0)).sum()
        return output.view_as(x)


def test_a_mixture_of_experts_with_its_auxiliary_loss(guarded: Guarded) -> None:
    ids, vocabulary = characters()
    model = Transformer(vocabulary)
    experts = [Experts() for _ in model.h]
    for block, its_own in zip(model.h, experts, strict=True):
        block.mlp = its_own
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            loss = model(*windows(ids, 4, LENGTH)).loss
            total = loss + 0.01 * torch.stack([each.spread for each in experts]).sum()
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.85)


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: torch.compile(model, backend="eager"),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.parametrize("backend", COMPILED)
def test_a_compiled_model(guarded: Guarded, backend: str) -> None:
    ids, vocabulary = characters()
    model = Transformer(vocabulary)
    compiled = COMPILED[backend](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    with guarded(compiled, optimizer):
        for _ in range(STEPS):
            loss = compiled(*windows(ids, 8, LENGTH)).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.85)
