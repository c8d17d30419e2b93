"""Microscope: a warning before the overflow, and none where nothing is going that way."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, GuardUsageError
from gpt_guard.callbacks.finite.microscope import Microscope

Reads = Literal["immediate", "per_step"]
both = pytest.mark.parametrize("reads", ["immediate", "per_step"])


class Growing(nn.Module):
    """A layer whose output grows by a factor from one forward to the next, in a dtype of its own."""

    def __init__(self, factor: float, dtype: torch.dtype, start: float = 1.0) -> None:
        super().__init__()
        self.factor, self.dtype, self.scale = factor, dtype, start

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= self.factor
        return (torch.tanh(x) * 0 + self.scale).to(self.dtype)


class Net(nn.Module):
    def __init__(self, growing: nn.Module) -> None:
        super().__init__()
        self.layer, self.growing = nn.Linear(4, 4), growing

    def forward(self, x: Tensor) -> Tensor:
        self.growing(x)
        out: Tensor = self.layer(x)
        return out


def run(model: nn.Module, steps: int, reads: Reads = "immediate", guard: Any = None) -> list[Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guards = [Microscope() if guard is None else guard]
    guardian = Guardian(model, optimizer, guards=guards, sinks=[], reads=reads)
    with guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    return [found for found in guardian.findings if found.code == "GG112"]


@both
def test_growth_towards_the_end_of_float16_is_told_before_it_is_there(reads: Reads) -> None:
    model = Net(Growing(1.5, torch.float16, start=100.0))
    (found,) = run(model, 15, reads)
    assert (found.module, found.module_class) == ("growing", "Growing")
    assert "float16, which ends at 65504" in found.seen
    assert "has grown" in found.seen
    assert found.step is not None
    # 100 * 1.5**n passes 65504 at n = 16.
    assert found.step < 15
    assert found.causes[0].startswith("float16 ends at 65504")


@both
def test_a_run_that_diverges_is_told_in_float32_too(reads: Reads) -> None:
    (found,) = run(Net(Growing(1e3, torch.float32)), 12, reads)
    assert found.causes[0].startswith("The learning rate is too high")
    assert "At this rate it is left within" in found.seen


@both
@pytest.mark.parametrize(
    "growing",
    [
        Growing(1.0, torch.float16, start=60000.0),
        Growing(1.1, torch.float32),
        Growing(1.02, torch.float16, start=10.0),
        Growing(0.5, torch.float16, start=60000.0),
    ],
    ids=["large and steady", "grows in float32", "grows slowly", "shrinks"],
)
def test_what_is_going_nowhere_is_quiet(reads: Reads, growing: nn.Module) -> None:
    assert run(Net(growing), 25, reads) == []


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full((2, 2), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1)


def test_a_mask_is_no_large_value() -> None:
    guard = Microscope()
    assert run(Net(Mask()), 8, guard=guard) == []
    assert next(row for row in guard._rows.values() if row.module == "growing").size == 0.0


def test_an_ordinary_run_is_quiet_and_has_a_table() -> None:
    guard = Microscope()
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    assert run(model, 8, guard=guard) == []
    head, *rows = guard.table().splitlines()
    assert head.split() == ["module", "dtype", "min", "max", "rms", "of", "range", "growth"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "(model)"]
    assert all("float32" in row for row in rows)


def test_figures_are_those_of_the_output() -> None:
    guard = Microscope()
    run(Net(Growing(1.0, torch.float32, start=3.0)), 1, guard=guard)
    row = next(row for row in guard._rows.values() if row.module == "growing")
    assert (row.low, row.high, row.rms) == pytest.approx((3.0, 3.0, 3.0))


def test_forwards_without_gradient_do_not_count() -> None:
    guard = Microscope()
    model = Net(Growing(10.0, torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[guard], sinks=[]), torch.no_grad():
        for _ in range(10):
            model(torch.randn(3, 4))
    assert guard._rows == {}


def test_it_comes_with_finite_guard_and_leaves_no_hook() -> None:
    model = Net(Growing(1.5, torch.float16, start=100.0))
    guard = FiniteGuard(microscope=True)
    assert guard.microscope is not None
    assert len(run(model, 15, guard=guard)) == 1
    assert "growing" in guard.microscope.table()
    assert not any(module._forward_hooks for module in model.modules())
    assert FiniteGuard().microscope is None


def test_a_window_without_a_rate_is_refused() -> None:
    with pytest.raises(GuardUsageError, match="window=2"):
        Microscope(window=2)


@both
def test_inspecting_now_gives_a_table_of_the_next_step(reads: Reads) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads, inspect_steps=0) as guardian:
        hooks = [len(module._forward_hooks) for module in model.modules()]
        scope = guardian.inspect_now()
        assert str(scope) == "No step has been measured yet."
        tables = []
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).mean().backward()
            optimizer.step()
            tables.append(str(scope))
        assert [line.split()[0] for line in tables[0].splitlines()] == ["module", "0", "1", "(model)"]
        assert tables[0] == tables[1]
        assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_inspecting_now_uses_the_microscope_that_is_there() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = FiniteGuard(microscope=True)
    with Guardian(model, optimizer, guards=[guard], sinks=[]) as guardian:
        assert guardian.inspect_now() is guard.microscope


def test_a_microscope_that_is_cut_short_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[], sinks=[], inspect_steps=0) as guardian:
        guardian.inspect_now(5)
        assert model[0]._forward_hooks
    assert not model[0]._forward_hooks
