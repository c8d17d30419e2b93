"""A guarded run is bit for bit the run it would have been."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.guardian import Guardian
from mini_gpt import MiniGPT, MiniGPTConfig

STEPS = 12
Run = dict[str, Any]


def gpt() -> nn.Module:
    return MiniGPT(MiniGPTConfig(vocab_size=20, block_size=8, embedding_dim=16, num_heads=2, num_layers=2, dropout=0.2))


class Convolutional(nn.Module):
    """BatchNorm buffers, dropout, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.3),
            nn.Flatten(),
            nn.Linear(144, 3),
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.body(x)
        return logits, F.cross_entropy(logits, y)


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(20, (4, 9))
    return ids[:, :-1], ids[:, 1:]


def images() -> tuple[Tensor, Tensor]:
    # All three generators take part, so that a use of any of them shows.
    x = torch.randn(4, 1, 8, 8) + random.random() + float(np.random.rand())
    return x, torch.randint(3, (4,))


MAKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "gpt": (gpt, tokens),
    "convolutional": (Convolutional, images),
}


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def train(kind: str, optimizer_of: Callable[[Any], Any], *, guarded: bool, reads: Any, scaled: bool = False) -> Run:
    seed()
    make, batch = MAKE[kind]
    model = make()
    optimizer = optimizer_of(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**100, growth_interval=3)
    losses: list[Tensor] = []
    watching: Any = Guardian(model, optimizer, scheduler=schedule, sinks=[], reads=reads) if guarded else nullcontext()
    with watching as guardian:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2):
                loss = model(*batch())[1]
                scaler.scale(loss / 2).backward()
                losses.append(loss.detach())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    losses.append(model(*batch())[1])
                model.train()
        if guarded:
            assert guardian.step + guardian.report().skipped_steps == STEPS
    return {
        "losses": losses,
        "weights": dict(model.state_dict()),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "modes": [module.training for module in model.modules()],
        "required": [parameter.requires_grad for parameter in model.parameters()],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_guarded_is_bit_identical_to_bare(kind: str, optimizer: str, reads: Any) -> None:
    bare = train(kind, OPTIMIZERS[optimizer], guarded=False, reads=reads)
    guarded = train(kind, OPTIMIZERS[optimizer], guarded=True, reads=reads)
    assert [name for name in bare if not same(bare[name], guarded[name])] == []


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_with_a_scaler_that_skips(reads: Any) -> None:
    bare = train("gpt", OPTIMIZERS["adamw"], guarded=False, reads=reads, scaled=True)
    guarded = train("gpt", OPTIMIZERS["adamw"], guarded=True, reads=reads, scaled=True)
    assert [name for name in bare if not same(bare[name], guarded[name])] == []


def test_the_comparison_notices_a_single_bit() -> None:
    bare = train("gpt", OPTIMIZERS["adamw"], guarded=False, reads="auto")
    other = train("gpt", OPTIMIZERS["adamw"], guarded=False, reads="auto")
    weight = next(iter(other["weights"].values()))
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    assert not same(bare["weights"], other["weights"])
    torch.rand(1)
    assert not same(bare["torch"], torch.get_rng_state())


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_lbfgs_is_bit_identical(reads: Any) -> None:
    def run(*, guarded: bool) -> list[Tensor]:
        seed()
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
        x = torch.randn(16, 3)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
            return loss

        with Guardian(model, optimizer, sinks=[], reads=reads) if guarded else nullcontext():
            for _ in range(4):
                optimizer.step(closure)
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    assert same(run(guarded=False), run(guarded=True))
