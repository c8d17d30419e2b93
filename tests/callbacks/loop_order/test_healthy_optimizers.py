"""LoopOrder is silent however a loop clips, scales, schedules, and shares its steps among optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from .order_loops import Body, batch, collected, cross_entropy, plain, run

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
HEALTHY, healthy = collected()


# Clipping.


@healthy
def clip_values_then_the_norm(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    clip_grad_value_(model.parameters(), 0.1)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@healthy
def clip_by_layer_a_frozen_one_among_them(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    cross_entropy(model).backward()
    for layer in model:
        clip_grad_norm_(list(layer.parameters()), 1.0)
    optimizer.step()


@healthy
def clip_one_part(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    clip_grad_norm_(model[2].parameters(), 1.0)
    optimizer.step()


@healthy
def measure_the_norm_after_the_step(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    plain(model, optimizer)
    clip_grad_norm_(model.parameters(), float("inf"))


# Mixed precision.


def scaler_of(kept: dict[str, Any], **options: Any) -> Any:
    if "scaler" not in kept:
        kept["scaler"] = torch.amp.GradScaler("cpu", **options)
    return kept["scaler"]


@healthy
def scale_unscale_clip(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = scaler_of(kept)
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@healthy
def scale_and_accumulate(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = scaler_of(kept)
    for _micro in range(4):
        scaler.scale(cross_entropy(model) / 4).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@healthy
def skip_the_first_steps(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = scaler_of(kept, init_scale=2.0**127)
    optimizer.zero_grad()
    scaler.scale(1e3 * cross_entropy(model)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@healthy
def schedule_though_the_scaler_leaves_steps_out(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = scaler_of(kept, init_scale=2.0**119)
    schedule = kept.setdefault("schedule", StepLR(optimizer, 100))
    optimizer.zero_grad()
    scaler.scale(1e3 * cross_entropy(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()


# Schedules.


@healthy
def schedule_by_epoch_in_the_old_style(step: int, model: Any, optimizer: Any, kept: Any) -> None:
    scheduler = kept["scheduler"] if kept else kept.setdefault("scheduler", StepLR(optimizer, 1))
    if step % 3 == 0:
        scheduler.step()
    plain(model, optimizer)


@healthy
def schedule_once_before_the_loop(step: int, model: Any, optimizer: Any, kept: Any) -> None:
    if step == 0:
        kept["scheduler"] = LambdaLR(optimizer, lambda at: at / 5)
        kept["scheduler"].step()
    plain(model, optimizer)
    kept["scheduler"].step()


@healthy
def schedule_in_sequence(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    if not kept:
        kept["scheduler"] = SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [3])
    plain(model, optimizer)
    kept["scheduler"].step()


@healthy
def schedule_by_a_metric(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scheduler = kept["scheduler"] if kept else kept.setdefault("scheduler", ReduceLROnPlateau(optimizer))
    optimizer.zero_grad()
    loss = cross_entropy(model)
    loss.backward()
    scheduler.step(loss.item())
    optimizer.step()


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("body", HEALTHY, ids=lambda body: body.__name__)
def test_a_healthy_loop_is_silent(body: Body, reads: str) -> None:
    assert run(body, steps=9, reads=reads, inspect_steps=6) == []


def test_a_line_search_is_silent() -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        x, y = batch(32)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    assert run(body, make=lambda parameters: LBFGS(parameters, max_iter=4), inspect_steps=6) == []


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, noise: Tensor) -> Tensor:
        scores: Tensor = self.discriminator(self.generator(noise))
        return scores


def alternating(_: int, model: Any, optimizers: Any, kept: Any) -> None:
    g_step, d_step = optimizers
    d_step.zero_grad()
    F.softplus(-model.discriminator(torch.randn(8, 4))).mean().backward()
    F.softplus(model.discriminator(model.generator(torch.randn(8, 2)).detach())).mean().backward()
    clip_grad_norm_(model.discriminator.parameters(), 1.0)
    d_step.step()
    g_step.zero_grad()
    F.softplus(-model(torch.randn(8, 2))).mean().backward()
    clip_grad_norm_(model.generator.parameters(), 1.0)
    g_step.step()


def cleared_before_the_other_steps(_: int, model: Any, optimizers: Any, kept: Any) -> None:
    g_step, d_step = optimizers
    model.zero_grad()
    model(torch.randn(8, 2)).square().mean().backward()
    g_step.step()
    g_step.zero_grad()
    clip_grad_norm_(model.parameters(), 1.0)
    d_step.step()


def in_one_function(_: int, model: Any, optimizers: Any, kept: Any) -> None:
    for step in optimizers:
        step.zero_grad()
        model(torch.randn(8, 2)).square().mean().backward()
        step.step()


@pytest.mark.parametrize("body", [alternating, cleared_before_the_other_steps, in_one_function])
def test_two_optimizers_are_silent(body: Body) -> None:
    def both(model: Any) -> list[SGD]:
        return [SGD(model.generator.parameters(), lr=0.1), SGD(model.discriminator.parameters(), lr=0.1)]

    assert run(body, model=Gan(), optimizers=both, inspect_steps=6) == []


def only_the_discriminator(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    generator = kept.setdefault("generator", nn.Linear(2, 4))
    other = kept.setdefault("other", SGD(generator.parameters(), lr=0.1))
    for turn in ("discriminator", "generator"):
        fake = generator(torch.randn(8, 2))
        loss = F.softplus(model(fake.detach() if turn == "discriminator" else -fake)).mean()
        optimizer.zero_grad()
        other.zero_grad()
        loss.backward()
        clip_grad_norm_((model if turn == "discriminator" else generator).parameters(), 1.0)
        (optimizer if turn == "discriminator" else other).step()


@pytest.mark.parametrize("model", [lambda: nn.Linear(4, 1)])
def test_a_second_model_beside_the_watched_one_is_silent(model: Callable[[], nn.Module]) -> None:
    assert run(only_the_discriminator, model=model(), inspect_steps=6) == []
