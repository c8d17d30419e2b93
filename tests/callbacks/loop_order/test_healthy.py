"""LoopOrder is silent in every legal order of calls, however unusual the loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from .order_loops import Body, batch, collected, cross_entropy, plain, run

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
HEALTHY, healthy = collected()


# Accumulation.


@healthy
def accumulate_and_clear_first(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(4):
        (cross_entropy(model) / 4).backward()
    optimizer.step()


@healthy
def accumulate_and_clear_last(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for _micro in range(3):
        (cross_entropy(model) * (1 / 3)).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    optimizer.zero_grad(set_to_none=False)


@healthy
def accumulate_sums_over_all_tokens(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    batches = [batch(rows) for rows in (2, 8, 4)]
    optimizer.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y, reduction="sum") / 14).backward()
    optimizer.step()


@healthy
def accumulate_weighted_means(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    batches = [batch(rows) for rows in (2, 8, 4)]
    optimizer.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y, label_smoothing=0.1) * (len(x) / 14)).backward()
    optimizer.step()


@healthy
def accumulate_nearly_equal_means(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for ignored in (0, 3):
        x, y = batch()
        y[:ignored] = -100
        (F.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()


@healthy
def divide_the_gradients(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(4):
        cross_entropy(model).backward()
    for parameter in model.parameters():
        parameter.grad /= 4
    optimizer.step()


@healthy
def divide_the_data_of_the_gradients(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(4):
        cross_entropy(model).backward()
    for parameter in model.parameters():
        parameter.grad.data.div_(4)
    optimizer.step()


@healthy
def one_small_batch_at_the_end(step: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for rows in (8, 8, 1 if step == 1 else 8):
        (cross_entropy(model, rows) / 3).backward()
    optimizer.step()


@healthy
def leave_out_a_bad_micro_batch(step: int, model: Any, optimizer: Any, kept: Any) -> None:
    for micro in range(3):
        (cross_entropy(model) / 3).backward()
        if step == 3 and micro == 1:
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@healthy
def tasks_of_their_own_sizes(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    def distance(logits: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(logits.softmax(-1), F.one_hot(labels, 3).float())

    optimizer.zero_grad()
    for rows, loss in ((4, F.cross_entropy), (32, distance)):
        x, y = batch(rows)
        (loss(model(x), y) / 2).backward()
    optimizer.step()


# Gradients that are used before they are cleared, or put together by hand.


@healthy
def sharpness_aware(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    x, y = batch()
    for climbing in (True, False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if climbing:
            with torch.no_grad():
                kept["up"] = [0.05 * parameter.grad for parameter in model.parameters()]
                for parameter, up in zip(model.parameters(), kept["up"], strict=True):
                    parameter.add_(up)
    with torch.no_grad():
        for parameter, up in zip(model.parameters(), kept["up"], strict=True):
            parameter.sub_(up)
    optimizer.step()


@healthy
def attack_the_inputs(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    x, y = batch()
    for attacking in (True, True, False):
        x = x.detach().requires_grad_()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if attacking:
            assert x.grad is not None
            x = x + 0.1 * x.grad.sign()
    optimizer.step()


@healthy
def project_the_gradients_of_tasks(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    tasks: list[list[Tensor]] = []
    for _task in range(3):
        optimizer.zero_grad()
        cross_entropy(model).backward()
        tasks.append([parameter.grad.clone() for parameter in model.parameters()])
    for parameter, *grads in zip(model.parameters(), *tasks, strict=True):
        parameter.grad = sum(grads)
    optimizer.step()


@healthy
def log_the_gradient_of_a_part(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    def gradient_of(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)

    x, y = batch()
    logits = model(x)
    part = F.cross_entropy(logits, y)
    gradient_of(part)
    gradient_of(part + 0.1 * model(x).square().mean())
    optimizer.step()


@healthy
def learn_to_learn(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    x, y = batch()
    slow = dict(model.named_parameters())
    loss = F.cross_entropy(functional_call(model, slow, (x,)), y)
    grads = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
    fast = {name: each - 0.1 * grad for (name, each), grad in zip(slow.items(), grads, strict=True)}
    F.cross_entropy(functional_call(model, fast, (x,)), y).backward()
    optimizer.step()


@healthy
def reptile(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    inner = copy.deepcopy(model)
    other = SGD(inner.parameters(), lr=0.1)
    for _inner in range(3):
        plain(inner, other)
    for parameter, reached in zip(model.parameters(), inner.parameters(), strict=True):
        parameter.grad = parameter.detach() - reached.detach()
    optimizer.step()


@healthy
def evolution_strategy(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data.copy_(torch.randn_like(parameter))
    optimizer.step()


@healthy
def clear_by_hand(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    cross_entropy(model).backward()
    optimizer.step()


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("body", HEALTHY, ids=lambda body: body.__name__)
def test_a_healthy_loop_is_silent(body: Body, reads: str) -> None:
    assert run(body, steps=9, reads=reads, inspect_steps=6) == []
