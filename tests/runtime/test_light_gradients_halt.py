"""A gradient of a light step that is not finite halts before it is scaled or used, whatever the loop does with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import NonFiniteError

from .clipping_kit import BAD, STEPS, clip_all, spoiled
from .lane_kit import Act, KeptLate, batch, net, pace, train, watched


def clip_or_raise(_step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def clip_others_too(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = nn.Linear(2, 2)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert float(nn.utils.clip_grad_norm_(other.parameters(), 1.0)) == pytest.approx(6**0.5)
    clip_all(step, model, optimizer)


def clip_in_two(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step < BAD:
        return clip_all(step, model, optimizer)
    first, *others = model.parameters()
    nn.utils.clip_grad_norm_([first], 0.1)
    nn.utils.clip_grad_norm_(others, 0.1)


def clip_backwards(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_([*model.parameters()][:: -1 if step == BAD else 1], 0.1)


def clip_one_by_one(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False if step == BAD else None)


def clip_by_the_largest(step: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, math.inf if step == BAD else 2.0)


def clip_not(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step != BAD:
        clip_all(step, model, optimizer)


def replace_first(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == BAD:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.nan_to_num(posinf=1.0)
    clip_all(step, model, optimizer)


ACTS: list[Act] = [
    clip_all,
    clip_or_raise,
    clip_others_too,
    clip_in_two,
    clip_backwards,
    clip_one_by_one,
    clip_by_the_largest,
    clip_not,
    replace_first,
]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("act", ACTS)
def test_a_gradient_that_is_not_finite_halts_before_it_is_scaled_or_used(act: Act, value: float) -> None:
    sink, model = KeptLate(), net()
    guardian, optimizer = watched(model, sink=sink, replay=False)
    weights: list[Tensor] = []

    def note(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == BAD:
            assert not pace(guardian).full
            weights[:] = [parameter.detach().clone() for parameter in model.parameters()]
        act(step, model, optimizer)

    with pytest.raises(NonFiniteError) as halt, guardian:
        list(spoiled(model, optimizer, note, value))
    found = halt.value.finding
    assert (found.code, found.step, found.micro_batch, found.parameter) == ("GG104", BAD, 0, "4.weight")
    assert found.where is not None
    assert found.where.text.endswith("# the usual line")
    assert halt.value.__context__ is None
    assert [seen.step for seen in sink.seen] == list(range(BAD))
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    # Clipping would have spread it to all of them.
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in [*model.parameters()][:-2])


class Cleared(Exception):
    """Ends a loop that has looked for itself."""


def clear_and_go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(Cleared):
        list(spoiled(model, optimizer, clear_at_bad))
    list(train(model, optimizer, range(BAD, STEPS)))


def test_one_that_a_loop_clears_away_is_told_at_the_next_backward() -> None:
    model = net()
    guardian, optimizer = watched(model, replay=False)
    with pytest.raises(NonFiniteError) as halt, guardian:
        clear_and_go_on(model, optimizer)
    found = halt.value.finding
    assert (found.code, found.step, found.parameter) == ("GG104", BAD, "4.weight")
    # What was put back for a look is gone again.
    assert all(parameter.grad is None for parameter in model.parameters())


def clear_at_bad(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == BAD:
        optimizer.zero_grad()
        raise Cleared
    clip_all(step, model, optimizer)


def test_one_that_nothing_follows_is_told_at_exit() -> None:
    model = net()
    guardian, optimizer = watched(model, replay=False)
    with pytest.raises(NonFiniteError) as halt, guardian, pytest.raises(Cleared):
        list(spoiled(model, optimizer, leave_at_bad))
    assert (halt.value.finding.step, halt.value.finding.parameter) == (BAD, "4.weight")


def leave_at_bad(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == BAD:
        raise Cleared
    clip_all(step, model, optimizer)


def two_lines(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step == BAD:
            loss.register_hook(lambda grad: grad * math.nan)
            loss.backward()  # another line
        else:
            loss.backward()
        clip_all(step, model, optimizer)
        optimizer.step()


def test_the_line_is_that_of_this_very_backward() -> None:
    model = net()
    guardian, optimizer = watched(model, replay=False)
    with pytest.raises(NonFiniteError) as halt, guardian:
        two_lines(model, optimizer)
    assert halt.value.finding.step == BAD
    assert halt.value.finding.where is not None
    assert halt.value.finding.where.text.endswith("# another line")
