"""A replay leaves no trace: model, loop, generators and what is around the step are as they were."""

from __future__ import annotations

import gc
import pickle
import random
import sys
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpt_guard import Finding, NonFiniteError
from gpt_guard.replaying.isolation import OwnState, copy_containers

from .divided import Divided, batches, mean, run
from .steps import Block, Net, Reads, both, guarded, halt, halting, root_at_zero, root_of_negative, said, sgd


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


class Keeping(nn.Linear):
    """Keeps something of every kind."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.seen = [1]
        self.cache: dict[str, int] = {}
        self.last = torch.ones(2)
        self.helper = object()


def model() -> tuple[nn.Sequential, Keeping]:
    keeping = Keeping()
    return nn.Sequential(keeping, nn.BatchNorm1d(2)), keeping


def test_a_module_that_is_left_alone_has_changed_nothing() -> None:
    net, keeping = model()
    state = OwnState(net)
    net.eval()
    net(torch.ones(3, 2))
    keeping.calls = 0
    copy_containers(net)
    assert state.changed() == []


def test_what_is_written_to_is_named() -> None:
    net, keeping = model()
    state = OwnState(net)
    net(torch.randn(3, 2))
    keeping.calls += 1
    keeping.seen.append(2)
    keeping.cache["x"] = 1
    keeping.last.add_(1)
    keeping.helper = object()
    names = ["0.calls", "0.seen", "0.cache", "0.last", "0.helper"]
    assert sorted(state.changed()) == sorted([*names, "1.running_mean", "1.running_var", "1.num_batches_tracked"])


def test_what_is_lent_is_the_same_in_two_places_and_not_the_original() -> None:
    first, second = Keeping(), Keeping()
    second.seen = seen = first.seen
    copy_containers(nn.Sequential(first, second))
    first.seen.append(2)
    assert second.seen == [1, 2]
    assert seen == [1]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.part, self.use_reentrant = nn.Linear(4, 4, bias=False), Divided(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.part, self.first(x), use_reentrant=self.use_reentrant)
        return found


@both
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_loop_that_goes_on_can_still_run_the_backward_of_a_checkpointed_part(
    use_reentrant: bool, reads: Reads
) -> None:
    found = run(Checkpointed(use_reentrant), reads, mean)
    assert said(found).startswith("Reproduced")
    assert found.module == "part"


def test_dispatch_modes_of_the_loop_do_not_see_a_replay() -> None:
    def flops(reads: Reads | None) -> int:
        total = 0

        def counted(model: nn.Module, x: Tensor) -> Tensor:
            nonlocal total
            with FlopCounterMode(display=False) as counter:
                loss = mean(model, x)
            total += counter.get_total_flops()
            return loss

        run(Divided(), reads, counted, inspect_steps=0) if reads else run(Divided(), reads, counted)
        return total

    assert flops("immediate") == flops(None) > 0


class Stops(Divided):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if not found.isfinite().all():
            breakpoint()  # what a person writes into a forward to look at a NaN
        return found


def test_a_breakpoint_stops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    assert said(run(Stops(), "immediate", mean)).startswith("Reproduced")
    assert stops == [1]
    breakpoint()
    assert len(stops) == 2


class Interrupted(Divided):
    """Ctrl-C at the second run of the bad batch."""

    calls = 0

    def before(self, x: Tensor) -> Tensor:
        self.calls += not x.any()
        if self.calls == 2:
            type(self).calls = 3
            raise KeyboardInterrupt
        return x


def test_ctrl_c_in_a_replay_stops_the_run_and_the_finding_is_told_all_the_same() -> None:
    model = Interrupted()
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)

    def loop() -> None:
        with guardian:
            for x in batches():
                optimizer.zero_grad()
                mean(model, x).backward()
                optimizer.step()

    with pytest.raises(KeyboardInterrupt) as stopped:
        loop()
    assert [found.code for found in guardian.findings] == ["GG101"]
    assert isinstance(stopped.value.__cause__, NonFiniteError)
    assert model.training
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
