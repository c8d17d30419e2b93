"""Calls that have no hook are noticed however they are spelt, and the patches are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import _global_optimizer_pre_hooks

from gpt_guard.callbacks.loop_order import calls
from gpt_guard.callbacks.loop_order.calls import LoopCalls, sees_clipping
from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.guardian import Guardian


class Clearing(SGD):
    """Overrides zero_grad, and calls that of its base."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class Own:
    """A scheduler that is none of torch's."""

    def step(self) -> None:
        pass


@contextmanager
def hearing(*optimizers: Optimizer, scheduler: Any = None) -> Iterator[list[tuple[str, Any]]]:
    heard: list[tuple[str, Any]] = []

    def hear(what: str, subject: Any) -> None:
        if what == "clipped":
            subject = (subject.how, subject.tensors, len(subject.gradients), subject.limit)
        heard.append((what, subject))

    loop = LoopCalls(hear)
    loop.open(optimizers, scheduler)
    try:
        yield heard
    finally:
        loop.close()
        loop.close()


def traces() -> list[Any]:
    kinds = [each for each in vars(schedules).values() if isinstance(each, type)]
    return [
        *(vars(owner).get("zero_grad") for owner in (Optimizer, nn.Module, Clearing)),
        *(vars(kind).get("step") for kind in (*kinds, Own)),
        dict(vars(clip_grad)),
        dict(_global_optimizer_pre_hooks),
    ]


def layer_and(kind: type[Optimizer]) -> tuple[nn.Linear, Optimizer]:
    layer = nn.Linear(2, 1)
    layer(torch.ones(3, 2)).sum().backward()
    return layer, kind(layer.parameters(), lr=0.1)  # type: ignore[call-arg]  # both kinds take lr


@pytest.mark.parametrize("kind", [SGD, Clearing])
def test_zero_grad_is_one_call_whoever_defines_it(kind: type[Optimizer]) -> None:
    layer, optimizer = layer_and(kind)
    with hearing(optimizer) as heard:
        optimizer.zero_grad()
        layer.zero_grad(set_to_none=False)
    assert heard == [("zeroed", optimizer), ("zeroed", layer)]


def test_clipping_is_told_with_what_it_was_given() -> None:
    layer, _ = layer_and(SGD)
    with hearing() as heard:
        clip_grad_norm_(layer.parameters(), 2.0)
        clip_grad_norm_(layer.weight, torch.tensor(3.0))  # type: ignore[arg-type]  # it takes tensors too
        nn.utils.clip_grad_norm_([], 1)
        clip_grad_value_(layer.parameters(), 0.5)
        clip_grad_value_([layer.bias], 0.5)
        nn.utils.get_total_norm([torch.ones(2)])
    assert heard == [
        ("clipped", ("norm", 2, 2, 2.0)),
        ("clipped", ("norm", 1, 1, 3.0)),
        ("clipped", ("norm", 0, 0, 1.0)),
        ("clipped", ("value", 2, 2, 0.5)),
        ("clipped", ("value", 1, 1, 0.5)),
    ]


def test_clipping_does_what_it_did() -> None:
    layer, _ = layer_and(SGD)
    bare = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    with hearing():
        norm = clip_grad_norm_(layer.parameters(), 0.1)
    assert norm == pytest.approx(float(torch.cat([grad.flatten() for grad in bare]).norm()))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, bare[0] * 0.1 / norm)


def test_a_scheduler_is_told_once_for_a_step_and_not_when_it_is_made() -> None:
    _, optimizer = layer_and(SGD)
    own = Own()
    with hearing(optimizer, scheduler=[own]) as heard:
        chain = schedules.ChainedScheduler([schedules.StepLR(optimizer, 1), schedules.ExponentialLR(optimizer, 0.9)])
        row = schedules.SequentialLR(
            optimizer, [schedules.LinearLR(optimizer), schedules.CosineAnnealingLR(optimizer, 9)], [1]
        )
        assert heard == []
        optimizer.step()
        for each in (chain, row, own):
            each.step()
    assert heard == [("other_step", optimizer), ("scheduled", chain), ("scheduled", row), ("scheduled", own)]


def test_unscale_is_told_when_the_loop_calls_it() -> None:
    layer, optimizer = layer_and(SGD)
    scaler = torch.amp.GradScaler("cpu")
    with hearing(optimizer) as heard:
        scaler.scale(layer(torch.ones(3, 2)).sum()).backward()
        scaler.unscale_(optimizer)
    assert heard == [("unscaled", optimizer)]


def test_everything_is_put_back() -> None:
    _, optimizer = layer_and(Clearing)
    before, unscale = traces(), torch.amp.GradScaler.unscale_
    with hearing(optimizer, scheduler=Own()):
        assert traces() != before
        assert torch.amp.GradScaler.unscale_ is not unscale
    assert traces() == before
    assert torch.amp.GradScaler.unscale_ is unscale


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_the_guard_leaves_nothing_behind_however_the_run_ends(steps: int) -> None:
    layer, optimizer = layer_and(Clearing)
    before = traces()
    guardian = Guardian(layer, optimizer, guards=[LoopOrder()], summary=False, sinks=[], reads="per_step")

    def interrupted() -> None:
        with guardian:
            for step in range(5):
                if step == steps:
                    raise KeyboardInterrupt
                # In place from the first step to the third, and gone after that.
                assert (traces() == before) is (step > 2)
                layer(torch.ones(3, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    if steps < 5:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    else:
        interrupted()
    assert traces() == before


def test_a_torch_that_clips_in_another_way_is_a_blind_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sees_clipping()
    monkeypatch.setattr(calls, "_CLIPS", calls._CLIPS[:1])
    layer, optimizer = layer_and(SGD)
    with Guardian(layer, optimizer, guards=[LoopOrder()], summary=False, sinks=[]) as guardian:
        for _ in range(4):
            optimizer.zero_grad()
            layer(torch.ones(3, 2)).sum().backward()
            clip_grad_value_(layer.parameters(), 0.0)
            optimizer.step()
    assert guardian.findings == ()
    assert any("clipping" in spot for spot in guardian.report().not_watched)


def test_a_compiled_step_is_clipped_as_ever() -> None:
    layer, optimizer = layer_and(SGD)

    def step() -> torch.Tensor:
        norm: torch.Tensor = clip_grad_norm_(layer.parameters(), 0.1)
        return norm

    compiled = torch.compile(step, backend="eager")
    with hearing(optimizer):
        first = compiled()
    assert float(first) > 0.1
    assert float(compiled()) == pytest.approx(0.1, rel=1e-4)
