"""Light steps: what is taken over from the step before is what would have been measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpt_guard.callbacks.updates.param_delta import ParamDeltaProbe
from gpt_guard.guardian import Guardian

from ..light_loops import LIGHT, STEPS, clip, clip_data, net, run, told


def new_storage(model: nn.Sequential, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


def now_and_then(model: nn.Sequential, step: int) -> None:
    if step % 7 == 3:
        clip(model, step)


@pytest.mark.parametrize("between", [lambda model, step: None, clip, clip_data, new_storage, now_and_then])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_figures_are_those_of_full_steps(between: Any, kind: Any) -> None:
    (light, seen), (full, expected) = run(between, kind=kind), run(between, kind=kind, full=True)
    assert all(expected.full)
    assert seen.figures() == [pytest.approx(row, rel=1e-6) for row in expected.figures()]
    assert told(light) == told(full) == []


def test_most_steps_of_a_plain_loop_are_light() -> None:
    _, seen = run()
    assert seen.full[:20] == [True] * 20
    assert seen.full[LIGHT:].count(True) <= 3


def test_values_are_not_copied_before_a_light_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = torch._foreach_copy_

    def counting(rows: Any, views: Any) -> None:
        taken.append(len(rows))
        take(rows, views)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    _, seen = run()
    # Before and after in a full step; after the step in a light one.
    assert len(taken) == STEPS + seen.full.count(True)


@pytest.mark.parametrize("late", [False, True])
def test_a_write_past_the_counters_ends_light_steps(late: bool) -> None:
    def between(model: nn.Sequential, step: int) -> None:
        if step >= LIGHT or not late:
            clip_data(model, step)

    guardian, seen = run(between, steps=60)
    assert all(seen.full[LIGHT + 8 :] if late else seen.full)
    assert told(guardian) == []


def test_a_write_that_shows_has_the_next_steps_measured_in_full() -> None:
    _, plain = run()
    assert not any(plain.full[31:34])
    _, seen = run(lambda model, step: clip(model, step) if step == LIGHT else None)
    assert all(seen.full[32:34])


def test_storage_given_in_a_light_step_is_no_standstill() -> None:
    def between(model: nn.Sequential, step: int) -> None:
        if step in (30, 31, 33, 40):
            weight = model[2].get_parameter("weight")
            weight.data = weight.data.clone()

    guardian, seen = run(between, steps=60, patience=1)
    assert told(guardian) == []
    assert sum(ratio is None for ratio, _ in seen.figures()) <= 1
    _, expected = run(between, steps=60, patience=1, full=True)
    pairs = zip(seen.figures(), expected.figures(), strict=True)
    assert all(some == pytest.approx(other, rel=1e-6) for some, other in pairs if some[0] is not None)


def test_parameters_added_in_a_light_step_are_measured_at_once() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    probe = ParamDeltaProbe()
    with Guardian(model, optimizer, guards=[probe], sinks=[]) as guardian:
        for step in range(40):
            if step == LIGHT + 1:
                model.append(nn.Linear(1, 1))
                optimizer.add_param_group({"params": model[-1].parameters()})
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            if step > LIGHT:
                assert guardian.latest is not None
                assert ("5.weight" in probe.update_ratios) == (len(model) == 6)
    assert told(guardian) == []


def test_what_is_asked_for_between_steps_is_that_of_the_last_one() -> None:
    _, expected = run(full=True)
    model, found = net(), {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    with Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[]) as guardian:
        for step in range(STEPS):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            if step % 3 == 0:
                assert guardian.latest is not None
                found[guardian.latest.step] = guardian.latest.update_ratio, guardian.latest.max_update
    assert list(found) == list(range(0, STEPS, 3))
    assert all(row == pytest.approx(expected.figures()[step], rel=1e-6) for step, row in found.items())


def test_losses_that_are_still_to_be_looked_at_keep_steps_full() -> None:
    _, seen = run(inspect_steps=40, steps=64)
    assert all(seen.full[:40])
    assert not all(seen.full[44:])
