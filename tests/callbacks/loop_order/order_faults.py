"""Loops that clear, add up, apply or clip their gradients at the wrong moment."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from .order_loops import Case, batch, cross_entropy

# Gradients.


def zero_in_each(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for _micro in range(4):
        optimizer.zero_grad()
        (cross_entropy(model) / 4).backward()
    optimizer.step()


def zero_in_each_by_the_model(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for _micro in range(2):
        loss = cross_entropy(model) / 2
        model.zero_grad(set_to_none=False)
        loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def never_zero(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    cross_entropy(model).backward()
    optimizer.step()


def zero_another(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    other = kept.setdefault("copy", copy.deepcopy(model))
    other.zero_grad()
    (cross_entropy(model) / 2).backward()
    (cross_entropy(model) / 2).backward()
    clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()


def zero_before_step(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    cross_entropy(model).backward()
    optimizer.zero_grad()
    optimizer.step()


def zero_before_step_in_place(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    cross_entropy(model).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad(set_to_none=False)
    optimizer.step()


def backward_twice(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    loss = cross_entropy(model)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def part_and_total(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    x, y = batch()
    logits = model(x)
    part = F.cross_entropy(logits, y)
    total = part + 0.1 * logits.square().mean()
    part.backward(retain_graph=True)
    total.backward()
    optimizer.step()


def step_twice(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    optimizer.step()
    optimizer.step()


def step_in_a_loop(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    cross_entropy(model).backward()
    for _again in range(2):
        optimizer.step()


# Clipping.


def clip_after_step(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    optimizer.step()
    clip_grad_norm_(model.parameters(), 1.0)


def clip_values_after_step(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    (cross_entropy(model) / 2).backward()
    (cross_entropy(model) / 2).backward()
    optimizer.step()
    clip_grad_value_(model.parameters(), 0.01)
    optimizer.zero_grad()


def clip_a_used_up_generator(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    parameters = kept.setdefault("parameters", model.parameters())
    list(parameters)
    optimizer.zero_grad()
    cross_entropy(model).backward()
    clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def clip_a_copy(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    other = kept.setdefault("copy", copy.deepcopy(model))
    optimizer.zero_grad()
    cross_entropy(model).backward()
    clip_grad_norm_(other.parameters(), 1.0)
    optimizer.step()


def clip_before_backward(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    loss = cross_entropy(model)
    clip_grad_norm_(model.parameters(), 1.0)
    loss.backward()
    optimizer.step()


def clip_before_backward_in_place(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    clip_grad_norm_(model.parameters(), 1.0)
    cross_entropy(model).backward()
    optimizer.step()


def clip_to_zero(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    clip_grad_norm_(model.parameters(), 0.0)
    optimizer.step()


def clip_to_minus_one(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    clip_grad_norm_(model.parameters(), -1)
    optimizer.step()


def clip_in_each(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for _micro in range(4):
        (cross_entropy(model) / 4).backward()
        clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def clip_values_in_each(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(2):
        (cross_entropy(model) / 2).backward()
        clip_grad_value_(list(model.parameters()), 0.01)
    optimizer.step()


def clip_scaled(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = kept.setdefault("scaler", torch.amp.GradScaler("cpu"))
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model)).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clip_scaled_and_unscale(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = kept.setdefault("scaler", torch.amp.GradScaler("cpu"))
    scaler.scale(cross_entropy(model) / 2).backward()
    scaler.scale(cross_entropy(model) / 2).backward()
    clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def unscale_in_the_first(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=4.0))
    optimizer.zero_grad()
    for micro in range(3):
        scaler.scale(cross_entropy(model) / 3).backward()
        if micro == 0:
            scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


CASES: list[Case] = [
    (zero_in_each, "GG230", "inside the loop over micro-batches", "optimizer.zero_grad()", "zero_grad ("),
    (zero_in_each_by_the_model, "GG230", "inside the loop", "model.zero_grad(", "x 2, clip ("),
    (never_zero, "GG209", "zero_grad() is missing", ".backward()", "step ("),
    (zero_another, "GG209", "zero_grad() is missing", ".backward()", "clip ("),
    (zero_before_step, "GG208", "cleared between backward() and step()", "optimizer.zero_grad()", "zero_grad ("),
    (zero_before_step_in_place, "GG208", "cleared between", "model.zero_grad(", "clip ("),
    (backward_twice, "GG235", "retain_graph=True", "loss.backward()", "backward ("),
    (part_and_total, "GG235", "retain_graph=True", "total.backward()", "backward ("),
    (step_twice, "GG236", "stands in two places", "optimizer.step()", "step ("),
    (step_in_a_loop, "GG236", "stands in two places", "optimizer.step()", "step ("),
    (clip_after_step, "GG231", "below optimizer.step()", "clip_grad_norm_", "clip ("),
    (clip_values_after_step, "GG231", "below optimizer.step()", "clip_grad_value_", "clip ("),
    (clip_a_used_up_generator, "GG232", "a generator", "clip_grad_norm_", "clip of nothing"),
    (clip_a_copy, "GG232", "another model", "clip_grad_norm_", "clip of other tensors"),
    (clip_before_backward, "GG232", "before backward()", "clip_grad_norm_", "clip ("),
    (clip_before_backward_in_place, "GG232", "before backward()", "clip_grad_norm_", "clip ("),
    (clip_to_zero, "GG233", "'no clipping' by 0", "clip_grad_norm_", "clip ("),
    (clip_to_minus_one, "GG233", "by -1", "clip_grad_norm_", "clip ("),
    (clip_in_each, "GG234", "inside the loop over micro-batches", "clip_grad_norm_", "clip ("),
    (clip_values_in_each, "GG234", "inside the loop over micro-batches", "clip_grad_value_", "clip ("),
    (unscale_in_the_first, "GG234", "unscale_(optimizer) stands inside", "unscale_", "unscale_ ("),
    (clip_scaled, "GG210", "before scaler.unscale_", "clip_grad_norm_", "clip ("),
    (clip_scaled_and_unscale, "GG210", "before scaler.unscale_", "clip_grad_value_", "clip ("),
]
