"""What a light step does to the model's state is found by the next forward, or before the state is given out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.hooks.pace import Pace

STEPS = 60
Batches = Callable[[int], Tensor]


class Spoils(torch.optim.AdamW):
    """Its step with this number makes one element of the first parameter NaN."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own subclasses do
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 31:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[-1] = math.nan


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, steps: int = STEPS) -> Iterator[int]:
    for step in range(steps):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        optimizer.step()
        yield step


def watched(model: nn.Module) -> tuple[Guardian, torch.optim.Optimizer]:
    optimizer = Spoils(model.parameters(), lr=1e-3)
    return Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], replay=False), optimizer


def spoilt(model: nn.Module, batches: Batches, after: Callable[[int], object]) -> tuple[Finding, int]:
    """What is told of a step that spoils a parameter, and how many steps were made by then."""
    guardian, optimizer = watched(model)
    with pytest.raises(NonFiniteError) as halt, guardian:
        list(map(after, train(model, optimizer, batches)))
    return halt.value.finding, guardian.step


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(16, 8)


def ids(step: int) -> Tensor:
    torch.manual_seed(step)
    # The last row of the table, number 9, is never used.
    return torch.randint(9, (16,))


def test_the_step_before_the_one_that_spoils_is_light() -> None:
    model = net()
    guardian, optimizer = watched(model)
    guardian.start()
    for _ in train(model, optimizer, rows, steps=30):
        pass
    assert guardian._session is not None
    assert not guardian._session.watch.pace.full
    guardian.stop()


def test_a_parameter_that_a_light_step_spoils_is_told_of_that_step_by_the_next_forward() -> None:
    found, made = spoilt(net(), rows, lambda _: None)
    assert (found.code, found.parameter, found.step, made) == ("GG106", "0.weight", 30, 31)


def test_it_is_told_before_it_can_be_saved() -> None:
    model = net()
    saved: list[int] = []

    def save(step: int) -> None:
        model.state_dict()
        saved.append(step)

    found, made = spoilt(model, rows, save)
    assert (found.code, found.parameter, found.step, made) == ("GG106", "0.weight", 30, 31)
    assert saved[-1] == 29


def test_a_row_that_no_forward_uses_is_told_in_the_next_full_step() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    found, made = spoilt(model, ids, lambda _: None)
    assert (found.code, found.parameter) == ("GG106", "0.weight")
    assert 31 < made <= 31 + Pace.every
    # It is known to have been finite then, and no more.
    since = found.evidence["since"]
    assert isinstance(since, int)
    assert since < 30 <= (found.step or 0)


def test_it_is_told_at_exit_at_the_latest() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    guardian, optimizer = watched(model)
    with pytest.raises(NonFiniteError), guardian:
        list(train(model, optimizer, ids, steps=32))
    assert guardian.step == 32


def test_nothing_is_left_on_state_dict() -> None:
    model = net()
    guardian, _ = watched(model)
    with guardian:
        assert model._state_dict_pre_hooks
        assert not copy.deepcopy(model)._state_dict_pre_hooks
    assert not model._state_dict_pre_hooks


def unseen(weight: Tensor) -> None:
    weight.data[0, 0] = math.nan


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[0, 0] = math.nan


def counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight[0, 0] = math.nan


@pytest.mark.parametrize("write", [unseen, by_numpy, counted])
@pytest.mark.parametrize("bad", [12, 30, 36])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_write_before_a_forward_is_not_laid_to_the_step_before(
    write: Callable[[Tensor], None], bad: int, kind: type[torch.optim.Optimizer]
) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]  # each takes one
    steps: list[int] = []

    def loop() -> None:
        for step in train(model, optimizer, rows, steps=STEPS):
            steps.append(step)
            if step == bad - 1:
                write(model.get_parameter("0.weight"))

    with Guardian(model, optimizer, sinks=[], summary=False), pytest.raises(NonFiniteError) as caught:
        loop()
    found = caught.value.finding
    assert (found.code, found.parameter, found.step) == ("GG105", "0.weight", bad)
    assert steps[-1] == bad - 1
    assert found.causes[0].startswith("Changed outside of optimizer.step()")
