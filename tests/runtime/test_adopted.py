"""Where no optimizer was given, the one that steps the model is watched from its first step on."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpt_guard import Guardian, GuardUsageError, NonFiniteError

Optimizer = torch.optim.Optimizer
TABLE: dict[int, Any] = vars(import_module("torch.optim.optimizer"))["_global_optimizer_pre_hooks"]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (scale * F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        step(model, optimizer)


def watched(model: nn.Module, loop: Callable[[], None]) -> Guardian:
    before = dict(TABLE)
    with Guardian(model, sinks=[], summary=False) as guardian:
        loop()
    assert before == TABLE
    return guardian


def codes(guardian: Guardian) -> list[str]:
    return [each.code for each in guardian.findings]


def test_it_is_watched_and_said_once_and_the_run_is_the_bare_one() -> None:
    bare, model = make(), make()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    for _ in range(8):
        step(bare, optimizer)
    torch.manual_seed(1)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guardian = watched(model, lambda: train(model, mine, 8))
    assert codes(guardian) == ["GG907"]
    assert "AdamW (6 tensors)" in guardian.findings[0].seen
    assert guardian.step == 8
    assert guardian.latest is not None
    assert guardian.latest.lr == (1e-2,)
    assert guardian.latest.loss is not None
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), model.parameters(), strict=True))


def test_one_that_is_made_inside_as_a_framework_does() -> None:
    model = make()

    def fit() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            step(model, optimizer)

    assert codes(watched(model, fit)) == ["GG907"]


def test_a_nan_halts_before_the_update() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for number in range(6):
            step(model, optimizer, scale=float("nan") if number == 4 else 1.0)

    with pytest.raises(NonFiniteError) as halted:
        watched(model, loop)
    assert halted.value.finding.step == 4
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    assert len(TABLE) == 0


def test_two_that_share_the_model_are_both_watched() -> None:
    model = make()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam([*model[1].parameters(), *model[2].parameters()], lr=1e-2)

    def loop() -> None:
        for _ in range(6):
            first.zero_grad()
            second.zero_grad()
            F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
            first.step()
            second.step()

    guardian = watched(model, loop)
    assert codes(guardian) == ["GG907", "GG907"]
    assert guardian.step == 6


class Lookahead(torch.optim.Optimizer):
    """A wrapper that shares the groups of the one it holds, and has tables that torch cannot use."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Sharpness(torch.optim.Optimizer):
    """Two steps in one, by an optimizer of its own over the same groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


@pytest.mark.parametrize(
    "wrapper",
    [lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)), lambda m: Sharpness(m.parameters())],
)
def test_a_wrapper_and_what_it_wraps_are_one(wrapper: Callable[[nn.Module], Optimizer]) -> None:
    model = make()
    optimizer = wrapper(model)
    guardian = watched(model, lambda: train(model, optimizer, 6))
    assert codes(guardian) == ["GG907"]
    assert guardian.step == 6


def test_a_wrapper_with_such_tables_can_be_given_too() -> None:
    model = make()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with Guardian(model, optimizer, sinks=[], summary=False) as guardian:
        for _ in range(5):
            step(model, optimizer)
    assert codes(guardian) == []
    assert guardian.step == 5


def test_one_that_holds_nothing_and_takes_no_hooks_is_refused_in_words() -> None:
    model = make()
    broken: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    broken._optimizer_step_pre_hooks = {}
    with pytest.raises(GuardUsageError, match="torch can put no hooks on"):
        Guardian(model, broken)


def test_the_optimizer_of_another_model_is_left_alone() -> None:
    teacher, student = make(), make()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def distil() -> None:
        for _ in range(6):
            x = torch.randn(16, 4)
            with torch.no_grad():
                target = teacher(x)
            optimizer.zero_grad()
            F.mse_loss(student(x), target).backward()
            optimizer.step()

    assert "GG907" not in codes(watched(teacher, distil))


def test_a_given_one_always_wins() -> None:
    model = make()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, mine, sinks=[], summary=False) as guardian:
        for _ in range(4):
            step(model, mine)
            step(model, other)
    assert "GG907" not in codes(guardian)
    assert guardian.step == 4


def test_entered_again_it_knows_the_optimizer() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(model, sinks=[], summary=False)
    for _ in range(2):
        with guardian:
            for _ in range(4):
                step(model, optimizer)
    assert codes(guardian) == ["GG907"]
    assert guardian.step == 8


def test_a_dropped_one_leaves_no_hook() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(model, sinks=[], summary=False).start()
    step(model, optimizer)
    del guardian
    gc.collect()
    assert len(TABLE) == 0
    assert not model._forward_hooks
    copy.deepcopy(optimizer)
    step(model, optimizer)


def test_two_guardians_on_one_model_do_not_take_each_others_probes_for_evaluations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for _ in range(8):
            rows = torch.randint(64, (8, 9))
            optimizer.zero_grad()
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()

    first = Guardian(model, optimizer, sinks=[]).start()
    train()
    second = Guardian(model, optimizer, sinks=[]).start()
    train()
    first.stop()
    train()
    second.stop()
    assert [codes(first), codes(second)] == [[], []]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
