"""Gradients that are lost in the middle of a run are told within a few steps; what a healthy loop leaves out is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

CUT = 30


@pytest.fixture(params=["immediate", "per_step"])
def reads(request: pytest.FixtureRequest) -> Any:
    return request.param


class Halves(nn.Module):
    """Two halves; `change` says what happens to the first one from step `CUT` on."""

    def __init__(self, change: str = "nothing") -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 1)
        self.change = change
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        change = self.change if self.step >= CUT else "nothing"
        if change == "no_grad":
            with torch.no_grad():
                h: Tensor = self.first(x)
        else:
            h = x if change == "left_out" else self.first(x)
        y: Tensor = self.last(h.detach() if change == "detach" else h)
        return y


def train(
    model: nn.Module,
    steps: int = 50,
    *,
    reads: Any = "immediate",
    to_none: bool = True,
    before: Callable[[int], Any] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[], summary=False, reads=reads) as guardian:
        for step in range(steps):
            before(step)
            model.step = step  # type: ignore[assignment]  # a plain number, for the model to ask
            x = torch.randn(16, 8)
            optimizer.zero_grad(set_to_none=to_none)
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return [found for found in guardian.findings if found.code in ("GG202", "GG304", "GG301", "GG302")]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    ("change", "cause", "severity"),
    [
        ("detach", "the graph was cut behind it", Severity.WARNING),
        ("no_grad", "only inside torch.no_grad()", Severity.WARNING),
        ("left_out", "never called in forward", Severity.INFO),
    ],
)
def test_half_of_the_model_has_no_gradient_any_more(
    change: str, cause: str, severity: Severity, to_none: bool, reads: Any
) -> None:
    (found,) = train(Halves(change), reads=reads, to_none=to_none)
    assert (found.code, found.severity, found.module) == ("GG202", severity, "first")
    assert found.step is not None
    assert CUT < found.step <= CUT + 5
    assert f"4 parameters that had gradients until step {CUT - 1} got none in the last 5 steps" in found.seen
    assert cause in found.causes[0]
    assert found.title == "Parameters get no gradient any more"


def test_where_the_graph_ends_is_named() -> None:
    (found,) = train(Halves("detach"))
    assert "The last of them to be called is `first.2`; the next module that got a gradient is `last`." in found.seen


def test_one_that_freezes_is_a_note(reads: Any) -> None:
    model = Halves()
    (found,) = train(model, reads=reads, before=lambda step: model.first.requires_grad_(False) if step == CUT else None)
    assert (found.code, found.severity) == ("GG202", Severity.INFO)
    assert "were frozen" in found.seen
    assert found.causes[0].startswith("requires_grad was set to False during the run")


def test_units_that_die_are_a_note_after_fifty_steps() -> None:
    model = Halves()
    relu = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.first = relu

    def kill(step: int) -> None:
        if step == CUT:
            nn.init.constant_(relu.get_parameter("0.bias"), -1e3)

    (found,) = train(model, 100, before=kill)
    assert (found.code, found.severity, found.parameter) == ("GG304", Severity.INFO, "first.0.weight")
    assert found.step == CUT + 49
    assert "All units behind it are dead" in found.causes[0]


# Healthy loops.


class Experts(nn.Module):
    """A router that sends tokens to one expert for a while, and then to none but the others."""

    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
        self.empty = empty
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        starved = self.step >= CUT
        parts = [x[:8], x[8:], x[:0]] if starved else [x[:5], x[5:10], x[10:]]
        used = [(expert, part) for expert, part in zip(self.experts, parts, strict=True) if self.empty or len(part)]
        return torch.cat([expert(part) for expert, part in used])


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_an_expert_without_tokens_for_a_while_is_quiet(empty: bool, to_none: bool, reads: Any) -> None:
    assert train(Experts(empty=empty), CUT + 40, to_none=to_none, reads=reads) == []


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)
        self.draw = random.Random(3)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.step < 6 or self.draw.random() < 0.3:
                x = x + layer(x).tanh()
        y: Tensor = self.last(x)
        return y


def test_stochastic_depth_is_quiet(reads: Any) -> None:
    assert train(LayerDrop(), 120, reads=reads) == []


class Tasks(nn.Module):
    """Two heads that take turns, a few steps each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.one, self.two = nn.Linear(8, 1), nn.Linear(8, 1)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        head = self.one if self.step // 4 % 2 == 0 else self.two
        y: Tensor = head(self.body(x).tanh())
        return y


def test_heads_that_take_turns_are_quiet_once_it_is_known(reads: Any) -> None:
    found = train(Tasks(), 80, reads=reads)
    assert [each for each in found if each.step is not None and each.step > 3] == []


def test_gradual_unfreezing_is_quiet(reads: Any) -> None:
    model = Halves()
    model.first.requires_grad_(False)
    found = train(model, reads=reads, before=lambda step: model.first.requires_grad_(True) if step == CUT else None)
    assert found == []


def test_a_bad_batch_that_is_skipped_is_quiet(reads: Any) -> None:
    model = Halves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[], summary=False, reads=reads) as guardian:
        for step in range(50):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
            if CUT <= step < CUT + 8:
                continue
            loss.backward()
            optimizer.step()
    assert "GG202" not in [found.code for found in guardian.findings]


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("critic_steps", [1, 6])
def test_the_two_optimizers_of_a_gan_are_quiet(critic_steps: int, reads: Any) -> None:
    model = Adversaries()
    opt_g = torch.optim.Adam(model.generator.parameters(), 1e-3)
    opt_c = torch.optim.Adam(model.critic.parameters(), 1e-3)
    bce = functional.binary_cross_entropy_with_logits
    with Guardian(model, [opt_g, opt_c], sinks=[], summary=False, reads=reads) as guardian:
        for _ in range(30):
            for _ in range(critic_steps):
                real, noise = torch.randn(8, 4), torch.randn(8, 4)
                opt_c.zero_grad()
                fake = model.critic(model.generator(noise).detach())
                (bce(model.critic(real), torch.ones(8, 1)) + bce(fake, torch.zeros(8, 1))).backward()
                opt_c.step()
            opt_g.zero_grad()
            bce(model.critic(model.generator(torch.randn(8, 4))), torch.ones(8, 1)).backward()
            opt_g.step()
    assert "GG202" not in [found.code for found in guardian.findings]


# Hooks.


def test_all_hooks_are_taken_away_when_the_run_ends_under_suspicion() -> None:
    model = Halves("detach")
    train(model, CUT + 3)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


# A norm that overflows by itself.


def spiking(
    factor: float, reads: Any, *, clip: bool = False, kind: type[torch.optim.Optimizer] = torch.optim.Adam
) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = kind(model.parameters(), lr=1e-30)  # type: ignore[call-arg]  # each takes one
    with Guardian(model, optimizer, sinks=[], summary=False, reads=reads) as guardian:
        for step in range(20):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
            (loss * factor if step == 10 else loss).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [found for found in guardian.findings if found.code in ("GG221", "GG102", "GG103", "GG101")]


def test_a_norm_that_overflows_over_finite_elements_is_told_as_that(reads: Any) -> None:
    (found,) = spiking(1e25, reads)
    assert (found.code, found.step) == ("GG221", 10)
    assert "but each element is finite" in found.seen
    assert isinstance(found.evidence["exact_norm"], float)
    assert 1e24 < found.evidence["exact_norm"] < 1e28


def test_what_clipping_by_it_does_is_told(reads: Any) -> None:
    (found,) = spiking(1e25, reads, clip=True, kind=torch.optim.SGD)
    assert found.code == "GG221"
    assert "made every gradient zero" in found.seen


def test_where_nothing_follows_from_it_nothing_is_said(reads: Any) -> None:
    assert spiking(1e25, reads, kind=torch.optim.SGD) == []


def test_a_large_norm_that_is_finite_is_no_overflow(reads: Any) -> None:
    assert spiking(1e15, reads) == []
