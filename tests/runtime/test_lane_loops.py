"""Loops that are not of the usual kind take the long way, and are seen as if there were no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lane_kit import KeptLate, Loop, accumulating, batch, net, train, watched


def leaving_a_step_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    for step in range(41):
        x, y = batch(step)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (100.0 if step == 28 else 1.0)).backward()
        if step == 28:
            # What it did not step on counts nowhere, whatever kind of step comes next.
            model.eval().train()
            continue
        optimizer.step()
        yield step


def stepping_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    for step in range(39):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 28:
            optimizer.step()
        yield step


def with_a_closure_after_a_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    for step in range(40):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step((lambda loss=loss: float(loss.detach())) if step >= 27 else None)
        yield step


def with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    for step in range(40):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        yield step


def scaled_late(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(40):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step < 30:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        yield step


def evaluating_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    for step in train(model, optimizer, range(40)):
        if step % 10 == 3:
            model.eval()
            with torch.no_grad():
                model(batch(1000 + step)[0])
            model.train()
        yield step


def freezing_late(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    # The first layer has no gradient any more, and then has one again.
    first = next(model.children())
    for step in train(model, optimizer, range(40)):
        if step == 26:
            first.requires_grad_(False)
        if step == 33:
            first.requires_grad_(True)
        yield step


LOOPS: Mapping[str, Loop] = {
    "accumulating": accumulating(lambda _: 2),
    "now and then accumulating": accumulating(lambda step: 3 if step % 7 == 3 else 1),
    "accumulating later": accumulating(lambda step: 2 if step >= 27 else 1),
    "leaving a step out": leaving_a_step_out,
    "stepping twice": stepping_twice,
    "with a closure after a backward": with_a_closure_after_a_backward,
    "with a closure": with_a_closure,
    "scaled late": scaled_late,
    "evaluating between": evaluating_between,
    "freezing late": freezing_late,
}


@pytest.mark.parametrize("name", LOOPS)
def test_other_kinds_of_loops_take_the_long_way_and_are_seen(name: str) -> None:
    sinks: list[KeptLate] = []
    for policy in ({"GG906": "record"}, None):
        sinks.append(KeptLate())
        model = net()
        guardian, optimizer = watched(model, sink=sinks[-1], policy=policy)
        with guardian:
            for _ in LOOPS[name](model, optimizer):
                pass
    full, late = (sink.seen for sink in sinks)
    assert [seen.step for seen in late] == list(range(40))
    assert not sinks[1].found, sinks[1].found
    for one, other in zip(full, late, strict=True):
        assert one.micro_batches == other.micro_batches, one.step
        assert one.loss == pytest.approx(other.loss, rel=1e-6), one.step
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6), one.step
        assert one.grad_norm_clipped == pytest.approx(other.grad_norm_clipped, rel=1e-5), one.step
