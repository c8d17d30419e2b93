"""What a person sees of a replay: in the exception, in a notebook, and by the arguments of Guardian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_guard import Guardian, GuardUsageError, NonFiniteError
from gpt_guard.records.render import render_finding

from .steps import Net, guarded, halting, root_of_negative, sgd


def test_a_replay_that_cannot_begin_leaves_the_plain_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("out of order")

    monkeypatch.setattr("gpt_guard.replaying.service.replay_step", broken)
    model = Net(root_of_negative)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        model(torch.randn(6, 4))
    assert halted.finding.replay == "Not replayed: OSError: out of order."


def mean_of_squares(y: Tensor) -> Tensor:
    return y.square().mean()


def test_in_a_notebook_the_step_can_be_run_again() -> None:
    model = Net(root_of_negative)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer).start()
    with pytest.raises(NonFiniteError):
        model(torch.randn(6, 4))
    assert "sqrt in `second`" in str(guardian.replay())
    model.second.function = torch.tanh
    outcome = guardian.replay()
    assert not outcome.reproduced
    assert "output of `second` is finite" in outcome.text
    guardian.stop()
    # The last one that belongs to a finding.
    assert guardian.replay().reproduced


def test_a_healthy_step_can_be_looked_at() -> None:
    model = Net(torch.tanh)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)
    with guardian:
        with pytest.raises(GuardUsageError, match="no step to run again"):
            guardian.replay()
        model(torch.randn(6, 4)).mean().backward()
        outcome = guardian.replay()
        assert not outcome.reproduced
        assert "Every operation of the forward gave finite values" in outcome.text
        optimizer.step()


@pytest.mark.parametrize("replay", [0, -1.0, float("nan"), "yes", None])
def test_a_limit_that_cannot_be_is_refused(replay: Any) -> None:
    with pytest.raises(GuardUsageError, match="replay"):
        Guardian(Net(torch.tanh), None, replay=replay)


def test_outside_of_a_guardian_a_watched_loss_is_the_plain_function() -> None:
    guardian = guarded(Net(torch.tanh), None)
    watched = guardian.watch_loss(mean_of_squares)
    y = torch.ones(3, 2)
    assert torch.equal(watched(y), mean_of_squares(y))
    assert watched.__name__ == "mean_of_squares"


def test_the_answer_is_in_the_message_of_the_exception() -> None:
    model = Net(root_of_negative)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        model(torch.randn(6, 4))
    told = render_finding(halted.finding)
    assert "return (-x.abs() - 1).sqrt()" in told
    assert "sqrt" in told
