"""LoopOrder is silent in every legal order of calls, with several losses, passes or phases in a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from .order_loops import Body, batch, collected, cross_entropy, plain, run

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
HEALTHY, healthy = collected()


@healthy
def two_losses_over_one_graph(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    x, y = batch()
    logits = model(x)
    F.cross_entropy(logits, y).backward(retain_graph=True)
    logits.square().mean().backward()
    optimizer.step()


@healthy
def one_loss_into_two_parts_of_the_model(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    loss = cross_entropy(model)
    loss.backward(inputs=list(model[0].parameters()), retain_graph=True)
    loss.backward(inputs=list(model[2].parameters()))
    optimizer.step()


@healthy
def gradient_penalty(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    x, y = batch()
    logits = model(x.requires_grad_())
    (grad,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    (F.cross_entropy(logits, y) + grad.norm(2, 1).sub(1).square().mean()).backward()
    optimizer.step()


@healthy
def several_epochs_on_one_batch(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    x, y = batch(32)
    with torch.no_grad():
        before = model(x).log_softmax(-1).gather(1, y[:, None])
    for _epoch in range(3):
        ratio = (model(x).log_softmax(-1).gather(1, y[:, None]) - before).exp()
        optimizer.zero_grad()
        (-ratio.clamp(0.8, 1.2).mean()).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@healthy
def truncated_backpropagation(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    x, y = batch(16)
    for chunk in range(0, 16, 4):
        F.cross_entropy(model(x[chunk : chunk + 4]), y[chunk : chunk + 4]).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@healthy
def a_closure_as_lightning_has_it(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    def closure() -> Tensor:
        loss = cross_entropy(model)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        return loss

    optimizer.step(closure)


@healthy
def train_and_evaluate_in_turn(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    model.train()
    plain(model, optimizer)
    model.eval()
    with torch.no_grad():
        cross_entropy(model)


@healthy
def average_the_weights(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    average = kept.setdefault("average", copy.deepcopy(model))
    plain(model, optimizer)
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.lerp_(parameter.data, 0.1)


@healthy
def leave_a_step_out_on_purpose(step: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    if step == 1:
        optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("body", HEALTHY, ids=lambda body: body.__name__)
def test_a_healthy_loop_is_silent(body: Body, reads: str) -> None:
    assert run(body, steps=9, reads=reads, inspect_steps=6) == []
