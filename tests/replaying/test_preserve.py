"""A run that goes on after a replay is the run without one, and nothing of the step is kept."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, NonFiniteError

from .steps import Block, Net, Reads, both, guarded, halt, halting, root_at_zero, root_of_negative, sgd


class Everything(nn.Module):
    """All the state that a forward can write to, and NaN in a tensor that nothing depends on."""

    def __init__(self, bad_step: int, *, gradient: bool) -> None:
        super().__init__()
        self.norm, self.drop, self.layer, self.probe = (
            nn.BatchNorm1d(4),
            nn.Dropout(0.3),
            nn.Linear(4, 4),
            Block(F.relu),
        )
        self.register_buffer("average", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.calls = 0
        self.bad_step, self.gradient = bad_step, gradient
        self.average: Tensor
        self.seen: list[float] = []
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        with torch.no_grad():
            self.scale.clamp_(0.5, 1.5).mul_(0.999)
        self.seen.append(float(x.detach().sum()))
        self.cache[self.calls % 3] = x.detach() * 2
        h = self.drop(self.norm(x)) * self.scale + random.random() + float(np.random.rand()) + torch.rand(4)
        bad = self.calls == self.bad_step
        self.probe(h.detach() * (float("nan") if bad and not self.gradient else 1.0))
        out: Tensor = self.layer(h) + self.average
        return out + (self.probe.layer(h) * 0).sqrt() if bad and self.gradient else out


def everything(model: Everything, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": {
            f"{index} {key}": value.clone()
            for index, entry in optimizer.state_dict()["state"].items()
            for key, value in entry.items()
            if isinstance(value, Tensor)
        },
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "cache": {str(key): value.clone() for key, value in model.cache.items()},
        "torch": torch.get_rng_state(),
        "plain": (model.calls, list(model.seen), python, pickle.dumps(numpy)),
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in model.modules()],
    }


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    return {key: bits(part) for key, part in value.items()} if isinstance(value, dict) else value


def survive(reads: Reads | None, *, gradient: bool) -> tuple[list[Any], list[Finding]]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = Everything(3, gradient=gradient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guardian = None if reads is None else guarded(model, optimizer, reads, policy={"GG1xx": "record"})
    states: list[Any] = []
    if guardian is not None:
        guardian.start()
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        before = [None if p.grad is None else (p.grad._version) for p in model.parameters()]
        states.append((bits(everything(model, optimizer)), before, loss.item()))
        optimizer.step()
    if guardian is not None:
        guardian.stop()
    return states, [] if guardian is None else list(guardian.findings)


@both
@pytest.mark.parametrize("gradient", [False, True])
def test_a_run_that_goes_on_is_bit_for_bit_the_run_without_replay(reads: Reads, gradient: bool) -> None:
    bare, _ = survive(None, gradient=gradient)
    watched, findings = survive(reads, gradient=gradient)
    replayed = [finding for finding in findings if finding.replay is not None]
    assert replayed, findings
    for step, (one, other) in enumerate(zip(bare, watched, strict=True)):
        for part, value in one[0].items():
            assert str(value) == str(other[0][part]), (step, part)
        assert one[1] == other[1]
        assert str(one[2]) == str(other[2])


@both
def test_the_loop_goes_on_through_a_backward_that_holds_what_was_replayed(reads: Reads) -> None:
    """What the graph of the running step has saved must not look written to."""
    model = Everything(1, gradient=False)
    optimizer = sgd(model)
    with guarded(model, optimizer, reads, policy={"GG1xx": "record"}) as guardian:
        first = model(torch.randn(6, 4))
        (first.mean() * model.scale.sum()).backward()
        optimizer.step()
    assert [finding.code for finding in guardian.findings] == ["GG101"]


def test_an_optimizer_inside_of_backward_does_not_step_in_a_replay() -> None:
    model = Net(root_at_zero)
    steps: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: steps.append(1))
    halt(model)
    assert len(steps) == len(list(model.parameters()))


@both
def test_after_leaving_nothing_of_the_step_is_alive(reads: Reads) -> None:
    model = Net(root_at_zero)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer, reads)
    loss_of = guardian.watch_loss(torch.mean)
    batch = torch.randn(6, 4)
    gone = weakref.ref(batch)
    with halting(guardian):
        loss_of(model(batch)).backward()
        optimizer.step()
    del batch
    gc.collect()
    assert gone() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@both
def test_a_step_that_went_well_lets_its_batch_go(reads: Reads) -> None:
    model = Net(torch.tanh)
    optimizer = sgd(model)
    with guarded(model, optimizer, reads):
        batch = torch.randn(6, 4)
        gone = weakref.ref(batch)
        model(batch).mean().backward()
        optimizer.step()
        del batch
        gc.collect()
        assert gone() is None


def test_a_guard_that_halts_again_and_again_is_not_replayed_for_ever() -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return root_of_negative(x)

    model = Net(counted)
    optimizer = sgd(model)
    with guarded(model, optimizer):
        for _ in range(10):
            with pytest.raises(NonFiniteError):
                model(torch.randn(6, 4))
    assert len(calls) == 10 + 3


class Going(Net):
    """Goes through containers of its own, and fails in the middle of it."""

    def __init__(self) -> None:
        super().__init__(root_of_negative)
        self.line: deque[int] = deque(maxlen=3)
        self.names: dict[str, int] = {"a": 0}
        self.kinds = {1}

    def forward(self, x: Tensor) -> Tensor:
        self.line.extend([1, 2, 3])
        for _ in self.line:
            for name in self.names:
                self.names[name] += 1
                for _ in self.kinds:
                    self.second(x)
        self.names[f"call {len(self.names)}"] = 1
        self.kinds.add(len(self.kinds) + 1)
        return self.head(x)  # type: ignore[no-any-return]  # a module call is Any


@both
def test_a_forward_that_is_going_through_a_container_goes_on(reads: Reads) -> None:
    model = Going()
    optimizer = sgd(model)
    with guarded(model, optimizer, reads, policy={"GG1xx": "record"}) as guardian:
        model(torch.randn(6, 4)).mean().backward()
        optimizer.step()
    assert [finding.operation is not None for finding in guardian.findings] == [True]
    assert (list(model.line), model.names, model.kinds) == ([1, 2, 3], {"a": 3, "call 1": 1}, {1, 2})
