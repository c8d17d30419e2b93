"""`guardian.evaluating()`: eval mode and no-grad inside, everything as it was outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.modes import evaluation_mode
from gpt_guard.records import Finding, Moment, Observation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.merged = False

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(self.frozen(x))
        return result


def setup() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    model.frozen.eval()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step()


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_each_module_gets_its_own_mode_back() -> None:
    model, optimizer = setup()
    before = modes(model)
    with Guardian(model, optimizer, sinks=[]) as guardian:
        with guardian.evaluating() as evaluated:
            assert evaluated is model
            assert not any(modes(model))
            assert model.merged
            assert not torch.is_grad_enabled()
            first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))
            assert torch.equal(first, second)
        assert modes(model) == before
        assert not model.merged
        assert torch.is_grad_enabled()


def test_a_model_in_eval_mode_stays_there() -> None:
    model, _ = setup()
    model.eval()
    with evaluation_mode(model):
        pass
    assert not any(modes(model))


def test_modes_come_back_after_an_error() -> None:
    model, optimizer = setup()
    before = modes(model)
    guardian = Guardian(model, optimizer, sinks=[])
    with pytest.raises(OSError, match="own"), guardian, guardian.evaluating():
        raise OSError("own")
    assert modes(model) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_what_happens_inside_is_evaluation(reads: Any) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        step(model, optimizer)
        before = guardian.latest
        assert before is not None
        session = guardian._session
        assert session is not None
        with guardian.evaluating():
            model(torch.randn(9, 4))
            assert session.watch.evaluation
            with guardian.evaluating(), torch.enable_grad():
                model(torch.randn(9, 4))
            assert session.watch.evaluation
        step(model, optimizer)
        assert not session.watch.evaluation
    assert guardian.latest is not None
    assert guardian.latest.samples == 12
    assert guardian.step == 2
    assert not guardian.findings


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_a_bad_output_is_found_in_evaluation_too(reads: Any) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[], reads=reads, policy={"GG1xx": "warn"}) as guardian:
        step(model, optimizer)
        with guardian.evaluating():
            model(torch.full((2, 4), float("nan")))
        found = guardian.findings[0]
        assert found.code.startswith("GG1")
        assert found.evaluation


def test_works_outside_of_an_active_guardian() -> None:
    model, _ = setup()
    guardian = Guardian(model, sinks=[])
    with guardian.evaluating():
        assert not any(modes(model))
    assert model.training


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_a_guardian_without_optimizer_watches_evaluation(reads: Any) -> None:
    model, _ = setup()
    with Guardian(model, sinks=[], reads=reads) as guardian:
        with guardian.evaluating():
            for _ in range(3):
                model(torch.randn(2, 4))
        assert guardian.latest is None
        assert guardian.step == 0
    assert guardian.findings == ()


def test_an_evaluation_forward_is_judged_where_reads_are_late() -> None:
    class Listens(Guard):
        judged_at = frozenset({Moment.FORWARD})

        def __init__(self) -> None:
            self.seen: list[tuple[Moment, bool]] = []

        def judge(self, seen: Observation) -> Iterable[Finding]:
            self.seen.append((seen.moment, seen.evaluation))
            return ()

    model, optimizer = setup()
    guard = Listens()
    with Guardian(model, optimizer, sinks=[], guards=[guard], reads="per_step") as guardian:
        model(torch.randn(2, 4))
        with guardian.evaluating():
            model(torch.randn(2, 4))
    assert guard.seen == [(Moment.FORWARD, True)]


class Trains(nn.Linear):
    """A model with a loop by the name of `train`."""

    def train(self, epochs: int = 5) -> Any:
        with torch.no_grad():
            self.weight += epochs
        return self


def test_a_train_that_is_a_loop_is_never_called() -> None:
    model = Trains(4, 4)
    before = model.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, sinks=[]).evaluating():
        assert not model.training
    assert model.training
    assert torch.equal(model.weight, before)
