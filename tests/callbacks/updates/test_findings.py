from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

Loss = Callable[[Tensor, Tensor], Tensor]


def watched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 60,
    loss_of: Loss = functional.mse_loss,
    before_step: Callable[[int], Any] = lambda step: None,
) -> list[Finding]:
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[])
    with guardian:
        for step in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            loss_of(model(x), x.sum(1, keepdim=True)).backward()
            before_step(step)
            optimizer.step()
    return list(guardian.findings)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


# Biases on which the loss does not depend.


def test_the_last_bias_of_a_critic_is_only_worth_knowing() -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    found = watched(model, optimizer, loss_of=lambda y, target: y[:8].mean() - y[8:].mean())
    assert [(each.code, each.severity, each.parameter) for each in found] == [("GG304", Severity.INFO, "4.bias")]
    assert found[0].causes[0].startswith("The loss does not depend on it")


def test_a_bias_before_a_normalisation_is_only_worth_knowing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(model.get_parameter("0.bias"), 100.0)
    found = watched(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert [(each.code, each.severity, each.parameter) for each in found] == [("GG304", Severity.INFO, "0.bias")]


def test_a_layer_that_is_dead_as_a_whole_is_a_warning_and_said_once() -> None:
    model = net()
    nn.init.constant_(model.get_parameter("2.bias"), -100.0)
    (found,) = watched(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert (found.code, found.severity) == ("GG304", Severity.WARNING)
    assert "`2.weight`" in found.seen


# One trouble, one finding.


def test_an_optimizer_of_a_copy_is_said_once() -> None:
    model = net()
    optimizer = torch.optim.Adam(copy.deepcopy(model).parameters(), lr=1e-2)
    assert [found.code for found in watched(model, optimizer)] == ["GG307"]


def test_rounding_in_half_precision_is_said_once() -> None:
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[]) as guardian:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(16, 4).bfloat16()).float().square().mean().backward()
            optimizer.step()
    found = list(guardian.findings)
    assert [each.code for each in found] == ["GG301"]
    assert "float16 or bfloat16" in found[0].causes[0]


def test_steps_that_are_too_small_are_said_once() -> None:
    model = net()
    found = watched(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    assert len(found) == 1
    assert found[0].code in ("GG301", "GG309")


def test_clipping_to_next_to_nothing_is_not_ours_to_say() -> None:
    model = net()

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)

    found = watched(model, torch.optim.SGD(model.parameters(), lr=1e-1), before_step=clip)
    assert "GG309" not in {each.code for each in found}


def test_gradients_whose_squares_overflow_are_found_in_the_state() -> None:
    model = net()
    (found,) = watched(
        model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_of=lambda y, target: y.abs().mean() * 1e30
    )
    assert (found.code, found.parameter, found.evidence["key"]) == ("GG315", "0.weight", "exp_avg_sq")
    assert "their squares overflow" in found.causes[0]


def test_a_step_that_does_nothing_is_not_blamed_on_half_precision() -> None:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # broken on purpose
            return None

    model = net()
    (found,) = watched(model, Idle(model.parameters(), lr=0.1))
    assert found.code == "GG301"
    assert found.causes[0].startswith("optimizer.step was replaced")


# A parameter that is replaced during the run.


def test_a_replaced_parameter_is_named_within_a_few_steps() -> None:
    model = net()

    def replace(step: int) -> None:
        if step == 10:
            last = model.get_submodule("4")
            last.weight = nn.Parameter(last.get_parameter("weight").detach().clone())

    found = watched(model, torch.optim.SGD(model.parameters(), lr=1e-2), before_step=replace)
    assert [(each.code, each.severity) for each in found] == [
        ("GG302", Severity.WARNING),
        ("GG307", Severity.INFO),
    ]
    assert found[0].step is not None
    assert found[0].step <= 16
    assert found[0].parameter == "4.weight"
    assert "added or replaced" in found[0].causes[0]


def test_parts_that_are_used_by_chance_are_quiet() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            used = list(self.parts)[: 3 if self.calls % 5 == 1 else 1]
            y: Tensor = torch.stack([part(x) for part in used]).sum(0)
            return y

    model = Sometimes()
    assert watched(model, torch.optim.SGD(model.parameters(), lr=1e-2)) == []
