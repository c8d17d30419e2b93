"""The gradients of light steps: norms heard from clip_grad_norm_, and what is observed where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, Guardian
from gpt_guard.callbacks.base import Guard
from gpt_guard.hooks.row_norms import RowNorms
from gpt_guard.records import Observation

from .clipping_kit import BAD, STEPS, clip_all, norm
from .lane_kit import KeptLate, light_steps, net, pace, train, watched


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of `RowNorms.measure`."""
    count, measure = [0], RowNorms.measure

    def counted(self: RowNorms, gradients: list[Tensor]) -> list[float]:
        count[0] += 1
        return measure(self, gradients)

    monkeypatch.setattr(RowNorms, "measure", counted)
    return count


def test_norms_that_are_heard_equal_those_that_are_measured(measured: list[int]) -> None:
    found: list[KeptLate] = []
    for policy in (None, {"GG906": "record"}):
        sink, model = KeptLate(), net()
        guardian, optimizer = watched(model, sink=sink, policy=policy)
        with guardian:
            for _ in train(model, optimizer, range(60)):
                pass
        found.append(sink)
        # A policy of one's own has every step measured in full. In neither is a light one measured twice, or at all.
        assert measured == [0]
    for heard, full in zip(found[0].seen, found[1].seen, strict=True):
        assert heard.grad_norms == pytest.approx(full.grad_norms, rel=1e-6)
        assert heard.grad_norm == pytest.approx(full.grad_norm, rel=1e-6)
        assert heard.grad_norm_clipped == pytest.approx(full.grad_norm_clipped, rel=1e-5)
        assert heard.clipped is full.clipped is True


def test_without_clipping_they_are_measured_once(measured: list[int]) -> None:
    model = net()
    guardian, optimizer = watched(model)
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(STEPS), clip=0.0))
    # The first that might be light is full once more: no learning rate is known to compare with.
    assert 0 < measured[0] <= len(light)


def test_training_and_what_clipping_returns_are_those_of_a_bare_run_to_the_bit() -> None:
    runs: list[tuple[list[Tensor], list[Tensor]]] = []
    for guarded in (False, True):
        model = net()
        totals: list[Tensor] = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def clip(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer, kept: list[Tensor] = totals) -> None:
            kept.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]

        loop = train(model, optimizer, range(STEPS), clip, clip=0.0)
        if guarded:
            with Guardian(model, optimizer, sinks=[]):
                list(loop)
        else:
            list(loop)
        runs.append((totals, [parameter.detach() for parameter in model.parameters()]))
    for bare, seen in zip(*runs, strict=True):
        assert len(bare) == len(seen)
        assert all(torch.equal(one, other) for one, other in zip(bare, seen, strict=True))


def scale_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def scale_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize(("scale", "kept"), [(scale_in_place, False), (scale_anew, True)])
def test_gradients_changed_before_they_are_clipped_make_full_steps(
    scale: Callable[[nn.Module], None], kept: bool
) -> None:
    after_backward: list[float] = []
    applied: list[float] = []
    full: list[bool] = []

    def act(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        after_backward.append(norm(model))
        if step >= BAD:
            scale(model)
        clip_all(step, model, optimizer)
        applied.append(norm(model))
        full.append(pace(guardian).full)

    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    with guardian:
        for _ in train(model, optimizer, range(STEPS), act, clip=0.0):
            pass
    assert not full[BAD - 1]
    # Those put in their place are only met at the step.
    assert all(full[BAD + kept :])
    assert [seen.grad_norm_clipped for seen in sink.seen] == pytest.approx(applied, rel=1e-5)
    told = [seen.grad_norm for seen in sink.seen]
    if not kept:
        # Of the one step in which it begins, nobody knows what the backward had left.
        assert told.pop(BAD) == pytest.approx(applied[BAD], rel=1e-5)
        after_backward.pop(BAD)
    assert told == pytest.approx(after_backward, rel=1e-5)


@pytest.mark.parametrize("clips", [lambda step: step % 5 == 0, lambda step: step < BAD, lambda step: step != BAD])
def test_steps_without_a_clip_are_observed_as_they_are(clips: Callable[[int], bool]) -> None:
    before: list[float] = []
    applied: list[float] = []

    def act(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before.append(norm(model))
        if clips(step):
            clip_all(step, model, optimizer)
        applied.append(norm(model))

    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink)
    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(60), act, clip=0.0))
    assert len(light) > 30
    assert [seen.grad_norm for seen in sink.seen] == pytest.approx(before, rel=1e-5)
    assert [seen.grad_norm_clipped for seen in sink.seen] == pytest.approx(applied, rel=1e-5)


class Backwards(Guard):
    """Looks at every backward."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def after_backward(self) -> None:
        assert self.watch.grad_norms is not None
        assert self.watch.loss is not None
        self.seen.append((self.watch.loss.item(), math.hypot(*self.watch.grad_norms.norms)))

    def judge(self, seen: Observation) -> Iterable[Finding]:
        return ()


def test_a_guard_that_looks_at_each_backward_is_not_kept_waiting() -> None:
    guard, sink, model = Backwards(), KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink, guards=[guard])

    def look(step: int, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        assert len(guard.seen) == step + 1

    def look_and_clip(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        look(step, model, optimizer)
        clip_all(step, model, optimizer)

    with guardian:
        light = light_steps(guardian, train(model, optimizer, range(STEPS), look_and_clip, clip=0.0))
    assert light
    assert not guardian.findings
    assert [loss for loss, _ in guard.seen] == [seen.loss for seen in sink.seen]
    assert [total for _, total in guard.seen] == pytest.approx([seen.grad_norm for seen in sink.seen], rel=1e-6)
