"""What a step does to the model's state is told at that step; what somebody else does, before it is used or saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError

BAD, STEPS = 12, 18
Batches = Callable[[int], Tensor]


class Spoils(torch.optim.AdamW):
    """Its step number `BAD` makes the last element of the first parameter NaN."""

    made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own subclasses do
        super().step(closure)
        if self.made == BAD:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[-1] = math.nan
        self.made += 1


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> Iterator[int]:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        optimizer.step()
        yield step


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def table() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))


def rows(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(16, 8)


def ids(step: int) -> Tensor:
    torch.manual_seed(step)
    # The last row of the table, number 9, is never used.
    return torch.randint(9, (16,))


def halt(
    model: nn.Module,
    batches: Batches,
    after: Callable[[int], object] = lambda _: None,
    *,
    kind: Callable[..., torch.optim.Optimizer] = Spoils,
    reads: Any = "auto",
) -> tuple[Finding, int]:
    """What a run is halted with, and how many steps were made by then."""
    optimizer = kind(model.parameters(), lr=1e-3)
    guardian = Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], replay=False, reads=reads)
    with pytest.raises(NonFiniteError) as caught, guardian:
        list(map(after, train(model, optimizer, batches)))
    return caught.value.finding, guardian.step


@pytest.mark.parametrize(("model", "batches"), [(net, rows), (table, ids)], ids=["used", "a row that nobody uses"])
def test_a_step_that_spoils_a_parameter_is_told_at_that_step(model: Callable[[], nn.Module], batches: Batches) -> None:
    found, made = halt(model(), batches)
    assert (found.code, found.parameter, found.step, made) == ("GG106", "0.weight", BAD, BAD + 1)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_it_is_told_before_it_can_be_saved(reads: Any) -> None:
    model = net()
    saved: list[int] = []

    def save(step: int) -> None:
        model.state_dict()
        saved.append(step)

    found, made = halt(model, rows, save, reads=reads)
    assert (found.code, found.parameter, found.step, made) == ("GG106", "0.weight", BAD, BAD + 1)
    assert saved[-1] == BAD - 1


def unseen(weight: Tensor) -> None:
    weight.data[-1, 0] = math.nan


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[-1, 0] = math.nan


def counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight[-1, 0] = math.nan


WRITES = [unseen, by_numpy, counted]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_write_before_a_forward_is_not_laid_to_the_step_before(
    write: Callable[[Tensor], None], kind: Callable[..., torch.optim.Optimizer], reads: Any
) -> None:
    model = net()

    def after(step: int) -> None:
        if step == BAD - 1:
            write(model.get_parameter("0.weight"))

    found, made = halt(model, rows, after, kind=kind, reads=reads)
    assert (found.code, found.parameter, found.step, made) == ("GG105", "0.weight", BAD, BAD)
    assert found.causes[0].startswith("Changed outside of optimizer.step()")


@pytest.mark.parametrize("write", WRITES)
def test_a_write_after_the_last_step_is_told_at_exit(write: Callable[[Tensor], None]) -> None:
    model = table()

    def after(step: int) -> None:
        if step == STEPS - 1:
            write(model.get_parameter("0.weight"))

    found, made = halt(model, ids, after, kind=torch.optim.AdamW)
    assert (found.code, found.parameter, made) == ("GG105", "0.weight", STEPS)
    assert f"finite after step {STEPS - 1}" in found.seen


@pytest.mark.parametrize("key", ["weight_decay", "eps"])
def test_settings_that_are_not_finite_are_the_cause(key: str) -> None:
    held: list[torch.optim.Optimizer] = []

    def make(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        held.append(torch.optim.AdamW(*args, **kwargs))
        return held[0]

    def after(step: int) -> None:
        if step == BAD - 1:
            held[0].param_groups[0][key] = math.nan

    found, _ = halt(net(), rows, after, kind=make)
    assert (found.code, found.step) == ("GG106", BAD)
    assert "weight_decay, eps, betas" in found.causes[0]
