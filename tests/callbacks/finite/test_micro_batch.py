"""Which micro-batch of a step a bad output belongs to, also where a loop begins to accumulate in mid-run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Guardian, NonFiniteError
from gpt_guard.testing import inject_nonfinite

from ...runtime.loop_kit import net

# Within the first steps, where all are measured in full, and among the light ones.
EARLY, LATE = 6, 30
# What a loop does up to a bad forward: each item is one forward, and says what comes after it.
Forwards = Iterator[str]


def one_by_one(last: int) -> Forwards:
    """A plain loop; the first forward of step `last` is bad."""
    for _ in range(last):
        yield "step"


def begins_to_accumulate(last: int) -> Forwards:
    """The same up to a step that has a second micro-batch."""
    yield from one_by_one(last)
    yield "backward"


def accumulates(last: int) -> Forwards:
    """Three micro-batches in each step; the third one of step `last` is bad."""
    for step in range(last + 1):
        yield from ["backward", "backward"] if step == last else ["backward", "backward", "step"]


def leaves_steps_out(last: int) -> Forwards:
    """The gradients of two forwards are thrown away, and no step is made of them."""
    yield from one_by_one(last)
    yield "clear"
    yield "clear"


def accumulates_after_that(last: int) -> Forwards:
    """The same, and then a second micro-batch."""
    yield from leaves_steps_out(last)
    yield "backward"


LOOPS: list[tuple[Callable[[int], Forwards], int]] = [
    (one_by_one, 0),
    (begins_to_accumulate, 1),
    (accumulates, 2),
    (leaves_steps_out, 0),
    (accumulates_after_that, 1),
]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, forwards: Forwards, bad: Callable[[], Tensor]) -> None:
    for then in forwards:
        model(torch.randn(4, 8)).square().mean().backward()
        if then == "step":
            optimizer.step()
        if then in ("step", "clear"):
            optimizer.zero_grad()
    bad().square().mean().backward()


@pytest.mark.parametrize("last", [EARLY, LATE])
@pytest.mark.parametrize(("loop", "micro_batch"), LOOPS, ids=[loop.__name__ for loop, _ in LOOPS])
def test_a_bad_output_is_told_with_its_micro_batch(
    loop: Callable[[int], Forwards], micro_batch: int, last: int
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def bad() -> Tensor:
        with inject_nonfinite(model, "2"):
            output: Tensor = model(torch.randn(4, 8))
        return output

    with Guardian(model, optimizer, sinks=[]), pytest.raises(NonFiniteError) as halt:
        run(model, optimizer, loop(last), bad)
    found = halt.value.finding
    assert (found.code, found.module) == ("GG101", "2")
    assert (found.step, found.micro_batch) == (last, micro_batch)
