"""Loops whose schedule, or whose sum over micro-batches, is not what it looks like."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from .order_loops import Case, batch, cross_entropy

# Schedules.


def schedule_first(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scheduler = kept["scheduler"] if kept else kept.setdefault("scheduler", ExponentialLR(optimizer, 0.9))
    optimizer.zero_grad()
    cross_entropy(model).backward()
    scheduler.step()
    optimizer.step()


def schedule_at_the_top(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scheduler = kept["s"] if kept else kept.setdefault("s", LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    scheduler.step()
    optimizer.zero_grad()
    cross_entropy(model).backward()
    optimizer.step()


def schedule_in_each(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scheduler = kept["scheduler"] if kept else kept.setdefault("scheduler", ExponentialLR(optimizer, 0.99))
    for _micro in range(2):
        (cross_entropy(model) / 2).backward()
        scheduler.step()
    optimizer.step()
    optimizer.zero_grad()


def schedule_another(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    if not kept:
        kept["scheduler"] = ExponentialLR(SGD(model.parameters(), lr=0.1), 0.9)
    optimizer.zero_grad()
    cross_entropy(model).backward()
    optimizer.step()
    kept["scheduler"].step()


# Accumulation.


def not_divided(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(4):
        cross_entropy(model).backward()
    optimizer.step()


def not_divided_mean_square(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    for _micro in range(3):
        x, _y = batch()
        (0.9 * (model(x) - x[:, :3]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def not_divided_and_cut(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(4):
        cross_entropy(model).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def mean_of_means(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for ignored in (0, 2, 6):
        x, y = batch()
        y[:ignored] = -100
        (F.cross_entropy(model(x), y) / 3).backward()
    optimizer.step()


def masked_means(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for length in (2, 6):
        x, y = batch()
        mask = (torch.arange(8) < length).float()
        losses = F.cross_entropy(model(x), y, reduction="none")
        ((losses * mask).sum() / mask.sum() * 0.5).backward()
    optimizer.step()


CASES: list[Case] = [
    (schedule_first, "GG411", "above optimizer.step()", "scheduler.step()", "scheduler.step ("),
    (schedule_at_the_top, "GG411", "above optimizer.step()", "scheduler.step()", "scheduler.step ("),
    (schedule_in_each, "GG405", "for each micro-batch", "scheduler.step()", "scheduler.step ("),
    (schedule_another, "GG404", "made again after the scheduler", '["scheduler"].step()', "scheduler.step ("),
    (not_divided, "GG238", "missing its division", ".backward()", "backward ("),
    (not_divided_mean_square, "GG238", "missing its division", ".backward()", "backward ("),
    (not_divided_and_cut, "GG238", "missing its division", ".backward()", "clip ("),
    (mean_of_means, "GG239", "a mean over the supervised tokens", ".backward()", "backward ("),
    (masked_means, "GG239", "a mean over the supervised tokens", ".backward()", "backward ("),
]
