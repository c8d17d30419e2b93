"""Parameters without gradient: who is named, why, when, and the healthy cases in which nobody is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.callbacks.gradients.missing import common_path, shown
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

WIDTH = 8


class Net(nn.Module):
    """Blocks in a list, and one way to run them that a test can break."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor], *, blocks: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))
        self.out = nn.Linear(WIDTH, 1)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.run(self, self.inp(x)))
        return result


def _blocks(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + block(x)
    return x


def all_used(net: Net, x: Tensor) -> Tensor:
    x = _blocks(net, x)
    extra: Tensor = net.extra(x)
    return x + extra


def watch(model: nn.Module, steps: int = 10, *, conditional_after: int = 50) -> list[Finding]:
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    guards = [GradNormMonitor(conditional_after=conditional_after)]
    with Guardian(model, optimizer, guards=guards, summary=False, sinks=[]) as guardian:
        for _ in range(steps):
            x = torch.randn(8, WIDTH)
            optimizer.zero_grad()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return list(guardian.findings)


def test_every_parameter_with_a_gradient_is_quiet() -> None:
    assert watch(Net(all_used)) == []


def test_an_unused_layer_is_named() -> None:
    def unused(net: Net, x: Tensor) -> Tensor:
        return _blocks(net, x)

    (finding,) = watch(Net(unused))
    assert (finding.code, finding.step, finding.module) == ("GG202", 2, "extra")
    assert finding.evidence["parameters"] == ["extra.weight", "extra.bias"]
    assert finding.evidence["why"] == {"unused_layer": 2}
    assert "never called in forward" in finding.causes[0]


def test_a_cut_graph_is_told_with_the_place_of_the_cut() -> None:
    def cut(net: Net, x: Tensor) -> Tensor:
        for place, block in enumerate(net.blocks):
            x = x + block(x)
            x = x.detach() if place == 1 else x
        extra: Tensor = net.extra(x)
        return x + extra

    (finding,) = watch(Net(cut))
    assert finding.evidence["count"] == 6
    assert finding.evidence["why"] == {"graph_cut": 6}
    assert "`blocks.1.0`; the next module that got a gradient is `blocks.2.0`" in finding.seen
    assert "the graph was cut" in finding.causes[0]


def test_a_part_that_runs_without_gradients_is_told_apart() -> None:
    def no_grad(net: Net, x: Tensor) -> Tensor:
        x = _blocks(net, x)
        with torch.no_grad():
            extra: Tensor = net.extra(x)
        return x + extra

    (finding,) = watch(Net(no_grad))
    assert finding.evidence["why"] == {"no_grad": 2}
    assert "no_grad" in finding.causes[0]


def test_a_parameter_that_its_module_does_not_use() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) * self.scale.data
            return result

    (finding,) = watch(Scale())
    assert finding.parameter == "scale"
    assert finding.evidence["why"] == {"unused_parameter": 1}
    assert ".data" in finding.causes[0]


def test_frozen_parameters_are_never_counted() -> None:
    model = Net(all_used)
    model.inp.requires_grad_(False)
    for block in model.blocks:
        block.requires_grad_(False)
    assert watch(model) == []


def test_a_layer_used_now_and_then_is_healthy_once_it_was_used() -> None:
    calls = 0

    def sometimes(net: Net, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return all_used(net, x) if calls == 3 else _blocks(net, x)

    assert watch(Net(sometimes)) == []


def skip_last(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks[:-1]:
        x = x + block(x)
    extra: Tensor = net.extra(x)
    return x + extra


@pytest.mark.parametrize(("steps", "told"), [(4, 3), (5, 4), (30, 4)])
def test_a_loop_that_ends_one_early_is_told_as_an_unused_layer(steps: int, told: int) -> None:
    (finding,) = watch(Net(skip_last), steps=steps)
    assert (finding.code, finding.severity, finding.step) == ("GG202", Severity.WARNING, told)
    assert finding.module == "blocks.3.0"
    assert "a loop that ends one early" in finding.causes[0]
    assert "one after another in every forward" in finding.seen


def test_stochastic_depth_is_quiet() -> None:
    draw = random.Random(0)

    def drop(net: Net, x: Tensor) -> Tensor:
        for place, block in enumerate(net.blocks):
            if place != 1 and draw.random() < 0.7:
                x = x + block(x)
        extra: Tensor = net.extra(x)
        return x + extra

    assert watch(Net(drop), steps=40) == []


def test_heads_of_tasks_that_come_later_are_quiet_for_a_while() -> None:
    def head(net: Net, x: Tensor) -> Tensor:
        extra: Tensor = net.extra(x)
        result: Tensor = extra + net.blocks[0](extra)
        return result

    assert watch(Net(head), steps=40) == []


class Experts(nn.Module):
    """A router and its experts; expert 3 never gets a token while `closed`."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        choice = torch.arange(len(x)) % 3
        mixed = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            if (choice == place).any():
                mixed = mixed.index_add(0, (choice == place).nonzero()[:, 0], expert(x[choice == place]))
        result: Tensor = self.out(mixed)
        return result


def test_an_expert_without_tokens_is_quiet_for_a_while() -> None:
    assert watch(Experts(), steps=49) == []


def test_an_expert_that_never_gets_a_token_is_told_in_the_end() -> None:
    (finding,) = watch(Experts(), steps=60)
    assert (finding.code, finding.step, finding.module) == ("GG202", 49, "experts.3.0")
    assert finding.severity is Severity.INFO
    assert finding.evidence["why"] == {"dead_branch": 2}
    (sooner,) = watch(Experts(), steps=60, conditional_after=8)
    assert sooner.step == 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_quiet(reentrant: bool) -> None:
    def recompute(net: Net, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        extra: Tensor = net.extra(x)
        return x + extra

    assert watch(Net(recompute)) == []


def test_a_gan_in_one_model_is_quiet() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = nn.Linear(4, 2), nn.Linear(2, 1)

        def forward(self, noise: Tensor) -> Tensor:
            fake: Tensor = self.g(noise)
            return fake

    model = Gan()
    optimizers = [SGD(model.d.parameters(), lr=0.01), SGD(model.g.parameters(), lr=0.01)]
    with Guardian(model, optimizers, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for step in range(30):
            fake = model(torch.randn(8, 4))
            optimizers[0].zero_grad()
            loss = F.softplus(-model.d(torch.randn(8, 2))) + F.softplus(model.d(fake.detach()))
            loss.mean().backward()
            optimizers[0].step()
            if step % 3 == 0:
                optimizers[1].zero_grad()
                F.softplus(-model.d(fake)).mean().backward()
                optimizers[1].step()
    assert not guardian.findings


def test_tied_weights_are_quiet() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.tok(x.argmax(1) % 5))
            return logits.mean(1, keepdim=True)

    assert watch(Tied()) == []


def test_hooks_are_gone_after_the_first_steps_and_not_copied() -> None:
    model = Net(all_used)
    optimizer = SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]):
        before = len(model.extra._forward_pre_hooks)
        copied = copy.deepcopy(model)
        copied(torch.randn(2, WIDTH))
        for _ in range(2):
            model(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
        assert len(model.extra._forward_pre_hooks) == before - 1


def test_names_are_capped_and_their_module_found() -> None:
    assert shown([f"p{place}" for place in range(9)]).endswith("p5 and 3 more")
    assert common_path(["a.b.w", "a.b.c.w"]) == "a.b"
    assert common_path(["a.w", "b.w"]) == ""
