"""Listening to clipping holds no loss and no gradient, and gives torch its functions back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad

from gpt_guard import Finding
from gpt_guard.callbacks.base import Guard
from gpt_guard.records import Observation

from .clipping_kit import BAD, STEPS, clip_all
from .lane_kit import batch, net, pace, train, watched

_PARTS = (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, torch.linalg.vector_norm)


@pytest.fixture(autouse=True)
def torch_has_its_functions_back() -> Iterator[None]:
    yield
    assert (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, torch.linalg.vector_norm) == _PARTS


class Fails(torch.autograd.Function):
    """Passes on what it is given; its backward raises if told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise MemoryError
        return grads[0], None


def test_no_loss_and_no_gradient_is_held() -> None:
    model = net()
    guardian, optimizer = watched(model, replay=False)
    light = 0
    with guardian:
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(Fails.apply(model(x), step == BAD), y)  # type: ignore[no-untyped-call]  # torch's own
            held = [weakref.ref(loss)]
            if step == BAD:
                with pytest.raises(MemoryError):
                    loss.backward()
                del loss
                gc.collect()
                assert held[0]() is None
                continue
            loss.backward()
            del loss
            if step % 9:
                clip_all(step, model, optimizer)
            optimizer.step()
            light += not pace(guardian).full
            held += [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            assert not any(each() is not None for each in held)
    assert light > 10


def test_nothing_is_held_once_a_run_is_over() -> None:
    model = net()
    guardian, optimizer = watched(model, replay=False)
    with guardian:
        for step in train(model, optimizer, range(BAD)):
            assert step < BAD
        x, y = batch(BAD)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        assert not pace(guardian).full
        loss.backward()
        held = [weakref.ref(loss), *(weakref.ref(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.zero_grad()
        del loss
    assert not any(each() is not None for each in held)


class Interrupts(Guard):
    """Is interrupted while it is attached."""

    def attach(self, watch: Any) -> None:
        raise KeyboardInterrupt

    def judge(self, seen: Observation) -> Iterable[Finding]:
        return ()


def test_an_entry_that_fails_leaves_torch_as_it_was() -> None:
    model = net()
    guardian, optimizer = watched(model, guards=[Interrupts()])
    with pytest.raises(KeyboardInterrupt), guardian:
        list(train(model, optimizer, range(1)))
    # The fixture looks at torch; this one trains on, unwatched.
    assert list(train(model, optimizer, range(2))) == [0, 1]
