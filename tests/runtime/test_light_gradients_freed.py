"""Gradients that no step uses are freed when the loop clears them, as without a Guardian, and without a collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, NonFiniteError
from gpt_guard.callbacks.base import Guard
from gpt_guard.records import Observation

from .lane_kit import KeptLate, batch, net, train, watched

# A step among the first, which are measured in full, and a light one.
EARLY, LATE = 8, 30
Refs = list[weakref.ref[Tensor]]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refs(model: nn.Module) -> Refs:
    return [weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def alive(found: Refs) -> int:
    return sum(each() is not None for each in found)


def gradients_of(model: nn.Module, step: int) -> Refs:
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    return refs(model)


@pytest.mark.parametrize("last", [EARLY, LATE])
def test_a_batch_that_is_left_out_after_clipping(last: int) -> None:
    model = net()
    guardian, optimizer = watched(model)
    with guardian:
        for _ in train(model, optimizer, range(last)):
            pass
        optimizer.zero_grad()
        left = gradients_of(model, last)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.zero_grad()
        x, y = batch(last + 1)
        loss = F.cross_entropy(model(x), y)
        assert left
        assert alive(left) == 0
        loss.backward()


def test_a_step_that_a_scaler_leaves_out() -> None:
    model = net()
    guardian, optimizer = watched(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with guardian:
        for step in range(EARLY):
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            left = refs(model)
            if step == EARLY - 1:
                next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]  # it has one
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert alive(left) == 0


def test_each_gradient_of_a_closure() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    left: list[Refs] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = batch(0)
        loss = F.cross_entropy(model(x), y)
        assert not any(map(alive, left))
        loss.backward()
        left.append(refs(model))
        return loss

    with Guardian(model, optimizer, sinks=[]):
        for _ in range(3):
            optimizer.step(closure)
            optimizer.zero_grad()
            assert not any(map(alive, left))
    assert len(left) > 3


def spoil(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(torch.nan)


@pytest.mark.parametrize("last", [EARLY, LATE])
@pytest.mark.parametrize("halts", [True, False])
def test_what_an_exception_that_is_caught_has_seen(last: int, halts: bool) -> None:
    model = net()
    guardian, optimizer = watched(model, guards=None if halts else [])
    left: Refs = []

    def fail() -> None:
        optimizer.zero_grad()
        next(model.parameters()).register_post_accumulate_grad_hook(spoil)
        gradients_of(model, last)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        optimizer.step()

    with guardian:
        for _ in train(model, optimizer, range(last)):
            pass
        with pytest.raises(NonFiniteError if halts else RuntimeError):
            fail()
        left += refs(model)
        optimizer.zero_grad()
        model(batch(0)[0])
        assert left
        assert alive(left) == 0


class Unpacks(Guard):
    """Takes names and norms out of `watch.grad_norms`, as a pair."""

    light = frozenset({"before_step"})

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.watch.grad_norms is not None
        names, norms = self.watch.grad_norms
        self.seen.append(dict(zip(names, norms, strict=True)))

    def judge(self, seen: Observation) -> tuple[()]:
        return ()

    def due(self) -> bool:
        return False


def test_a_guard_of_the_users_may_unpack_the_norms_of_any_step() -> None:
    model, guard, sink = net(), Unpacks(), KeptLate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[guard], sinks=[sink]) as guardian:
        for _ in train(model, optimizer, range(LATE)):
            pass
    assert guardian.findings == ()
    assert guard.seen == [pytest.approx(seen.grad_norms) for seen in sink.seen]


class Plain(torch.optim.Optimizer):
    """SGD that takes gradients of another dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns nothing
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad.to(parameter.dtype), alpha=-0.01)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_norms_stand_under_their_names_where_gradients_have_several_dtypes() -> None:
    model: Any = net()
    model[1].weight.grad_dtype = torch.float64
    optimizer, sink, by_hand = Plain(model), KeptLate(), []
    with Guardian(model, optimizer, sinks=[sink], summary=False):
        for step in range(LATE):
            optimizer.zero_grad()
            gradients_of(model, step)
            by_hand.append({name: float(each.grad.double().norm()) for name, each in model.named_parameters()})
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert [seen.grad_norms for seen in sink.seen] == [pytest.approx(norms, rel=1e-5) for norms in by_hand]


class Stops(Guard):
    """Stands for a Ctrl-C while a step that waits is judged."""

    late = True
    stopped = False

    def judge(self, seen: Observation) -> tuple[()]:
        if seen.step == LATE - 2 and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt
        return ()


def test_a_step_is_told_of_though_its_judging_was_stopped() -> None:
    model, sink = net(), KeptLate()
    guardian, optimizer = watched(model, sink=sink, guards=[Stops()])
    with pytest.raises(KeyboardInterrupt), guardian:
        for _ in train(model, optimizer, range(LATE + 30)):
            pass
    assert guardian.step > LATE - 2
    assert [seen.step for seen in sink.seen] == list(range(guardian.step))
