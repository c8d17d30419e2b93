"""A step that fails long after entry, where less is read: its replay shows what that of a first step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding

from .steps import Net, Reads, both, guarded, halting, operation, root_at_zero, root_of_negative, said, same, sgd

# All is read in the first twenty steps, and then in one of sixteen: the steps after these are light ones.
_HEALTHY = 22
_MODES = "Modules were put into another mode without a call"


def halt_late(
    model: nn.Module,
    goes_bad: Callable[[], None],
    loss_of: Callable[[Any], Tensor] = torch.mean,
    reads: Reads = "immediate",
    *,
    last_loss_of: Callable[[Any], Tensor] | None = None,
) -> Finding:
    """The finding that halts the step after a number of healthy ones."""
    optimizer = sgd(model)
    guardian = guarded(model, optimizer, reads)
    with halting(guardian) as halted:
        for step in range(_HEALTHY + 1):
            if step == _HEALTHY:
                goes_bad()
                loss_of = last_loss_of or loss_of
                session = guardian._session
                assert session is not None
                assert session.watch.pace.full == (reads == "per_step")
            optimizer.zero_grad()
            loss_of(model(torch.randn(6, 4))).backward()
            optimizer.step()
    assert halted.finding.step == _HEALTHY
    return halted.finding


def second(output: Any) -> Tensor:
    loss: Tensor = output[1]
    return loss


LOSSES: list[Any] = [
    pytest.param(False, torch.mean, id="outside"),
    pytest.param(True, second, id="returned"),
    pytest.param(True, lambda output: output[1] / 4, id="divided"),
    pytest.param(True, lambda output: output[1].div_(4), id="divided in place"),
]


@both
@pytest.mark.parametrize(("with_loss", "loss_of"), LOSSES)
def test_a_forward_that_goes_bad_late(reads: Reads, with_loss: bool, loss_of: Any) -> None:
    model = Net(same, with_loss=with_loss)
    found = halt_late(model, lambda: setattr(model.second, "function", root_of_negative), loss_of, reads)
    assert operation(found).name == "sqrt"


@both
@pytest.mark.parametrize(("with_loss", "loss_of"), LOSSES)
def test_a_backward_that_goes_bad_late(reads: Reads, with_loss: bool, loss_of: Any) -> None:
    model = Net(same, with_loss=with_loss)
    found = halt_late(model, lambda: setattr(model.second, "function", root_at_zero), loss_of, reads)
    assert operation(found).name.startswith("sqrt"), found.replay


def test_a_loss_that_comes_from_elsewhere_for_the_first_time_is_not_guessed() -> None:
    model = Net(same, with_loss=True)
    found = halt_late(
        model,
        lambda: setattr(model.second, "function", root_at_zero),
        second,
        last_loss_of=lambda output: output[1] * 2,
    )
    assert "the gradient that reached output[1] of the model is no longer held" in said(found)


class OnlyInTraining(nn.Module):
    """Bad where it is in training mode, or only where it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bad_in: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(self.layer(x), 0.5, self.training)
        return y / (y - y) if self.bad_in == self.training else y


@pytest.mark.parametrize("by_call", [True, False])
def test_it_is_replayed_in_the_modes_that_it_had(by_call: bool) -> None:
    model = OnlyInTraining()

    def goes_bad() -> None:
        model.bad_in = False
        if by_call:
            model.eval()
        else:
            model.training = False

    found = halt_late(model, goes_bad)
    assert operation(found).name.startswith("div")
    assert (_MODES in said(found)) is not by_call


def test_of_modes_that_stay_nothing_is_said() -> None:
    model = OnlyInTraining()
    found = halt_late(model, lambda: setattr(model, "bad_in", True))
    assert operation(found).name.startswith("div")
    assert _MODES not in said(found)
