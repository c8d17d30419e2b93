"""The meter alone: figures that are worked out when somebody asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.callbacks.updates.param_meter import Meter
from gpt_guard.hooks.ledger import LATER, Ledger
from gpt_guard.hooks.pace import Pace
from gpt_guard.hooks.versions import ParameterVersions
from gpt_guard.records import Moment, Observation


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


@torch.no_grad()
def clip(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def meter(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> tuple[Meter, Any]:
    """A meter with as much of a watch as it needs, in light steps."""
    pace = Pace(light=True)
    pace.full = False
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    watch: Any = SimpleNamespace(
        model=model, optimizers=(optimizer,), immediate=True, step=0, pace=pace, ledger=Ledger()
    )
    watch.closure = watch.scaling = False
    watch.versions = ParameterVersions(dict(model.named_parameters()))
    watch.index_of = lambda _: 0
    watch.name_of = lambda tensor: names.get(id(tensor))
    return Meter(watch, 64, 1), watch


def test_figures_may_be_asked_for_later() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    # One sampler waits, the other does not.
    (late, watch), (prompt, other) = meter(model, optimizer), meter(model, optimizer)
    asked: list[Any] = []
    expected: list[Any] = []
    for step in range(40):
        watch.step = other.step = step
        optimizer.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        if step % 11 == 5:
            clip(model)
        for each, its in ((late, watch), (prompt, other)):
            its.pace.full = step % 11 in (0, 7)
            its.versions.step_begins((0, step))
            each.before(optimizer)
        optimizer.step()
        for its in (watch, other):
            its.versions.step_ended()
        watch.pace.full, other.pace.full = False, True
        late.after(optimizer)
        prompt.after(optimizer)
        asked.append(watch.ledger.read()[None])
        expected.append(other.ledger.read()[None])
        if step % 5 == 0:
            late.settle()
    assert sum(LATER in each for each in asked) > 20
    for found, wanted in zip(asked, expected, strict=True):
        assert (found[LATER]() if LATER in found else found) == pytest.approx(wanted, rel=1e-6)
    for step in range(40):
        seen = Observation(step=step, moment=Moment.AFTER_STEP)
        measured = late.read(seen)
        assert measured is not None
        assert measured.columns is not None
        assert measured.columns.norm == pytest.approx(prompt.read(seen).columns.norm, rel=1e-6)  # type: ignore[union-attr]  # as above
