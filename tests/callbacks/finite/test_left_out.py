"""A bad loss that the loop itself leaves out is a note; one that reaches backward() halts as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, Guardian, NonFiniteError, Severity


class WithLoss(nn.Module):
    """Returns scores and the loss, as language models do; NaN where no target counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.body(x)
        return scores, F.cross_entropy(scores, y)


Reads = Literal["immediate", "per_step"]
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


def leave_out(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    _, loss = model(x, y)
    if not torch.isfinite(loss):
        return
    loss.backward()
    optimizer.step()


def two_at_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The forward that goes bad is not the last one before backward."""
    optimizer.zero_grad()
    (model(x, y)[1] + model(x, torch.zeros_like(y))[1]).backward()
    optimizer.step()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    model(x, y)[1].backward()
    optimizer.step()


def run(step: Step, bad: set[int], reads: Reads = "immediate") -> tuple[Finding, ...]:
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(model, optimizer, reads=reads, inspect_steps=0, sinks=[], summary=False)
    try:
        with guardian:
            for number in range(12):
                y = torch.full((8,), -100) if number in bad else torch.randint(3, (8,))
                step(model, optimizer, torch.randn(8, 4), y)
    except NonFiniteError as error:
        assert all(bool(each.isfinite().all()) for each in model.parameters())
        return (error.finding,)
    return tuple(guardian.findings)


@pytest.mark.parametrize("bad", [{5}, {5, 6, 9}, {11}, {0}], ids=str)
@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_a_batch_that_the_loop_leaves_out_is_at_most_a_note(bad: set[int], reads: Reads) -> None:
    assert [each for each in run(leave_out, bad, reads) if each.severity is not Severity.INFO] == []


def test_the_note_says_that_nothing_came_of_it() -> None:
    (note,) = run(leave_out, {5})
    assert (note.code, note.step, note.severity) == ("GG102", 5, Severity.INFO)
    assert "No backward() was called on it" in note.seen


@pytest.mark.parametrize("step", [plain, two_at_once])
@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_one_that_backward_gets_halts_before_the_update(step: Step, reads: Reads) -> None:
    (found,) = run(step, {5}, reads)
    assert (found.code, found.step, found.severity) == ("GG102", 5, Severity.ERROR)


def test_one_after_some_that_were_left_out_halts() -> None:
    seen: list[int] = []

    def careless(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        seen.append(1)
        (leave_out if len(seen) < 8 else plain)(model, optimizer, x, y)

    (found,) = run(careless, {3, 9})
    assert (found.step, found.severity) == (8, Severity.ERROR)
