"""What the looks at the model say: every bug is named, with its module and its line; every twin is silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.attention.embedding import IndexCalls
from gpt_guard.callbacks.attention.guard import AttentionCalls
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

from ...cases.model_probe_twins import Twin, twins
from ...cases.model_probes import Case, cases


def guards() -> list[Guard]:
    return [ModelProbe(), AttentionCalls(), IndexCalls(), EvalModeAssert()]


def guard(model: nn.Module, optimizer: Optimizer, *given: Guard, **options: Any) -> Guardian:
    return Guardian(model, optimizer, guards=list(given) or guards(), sinks=[], **options)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def run(case: Case, steps: int, **options: Any) -> tuple[Finding, ...]:
    model = case.make()
    with guard(model, optimizer := adam(model), **options) as guardian:
        case.loop(model, optimizer, steps)
    return guardian.findings


BUGS = [case for case in cases() if case.code is not None]
TWINS = [case for case in cases() if case.code is None]


@pytest.mark.parametrize("case", BUGS, ids=lambda case: case.name)
def test_a_bug_is_named_in_the_first_steps(case: Case) -> None:
    found = {each.code: each for each in reversed(run(case, 3))}
    assert case.code in found
    told = found[case.code]
    assert told.module == case.module
    assert told.step is not None
    assert told.step < 3
    assert case.line is None or (told.where is not None and case.line in told.where.text)


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.name)
def test_its_healthy_twin_is_silent(case: Case) -> None:
    assert run(case, 22, inspect_every=7) == ()


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("twin", list(twins()), ids=lambda twin: twin.name)
def test_healthy_models_of_other_kinds_are_silent_and_bit_identical(twin: Twin, reads: Any) -> None:
    bare, guarded = train(twin), train(twin, reads=reads)
    assert [found for found in guarded[0] if found.severity is not Severity.INFO] == []
    assert bare[1] == guarded[1]
    assert all(torch.equal(value, guarded[2][name]) for name, value in bare[2].items())
    assert torch.equal(bare[3], guarded[3])


def train(twin: Twin, **options: Any) -> tuple[Any, ...]:
    """Findings, losses, weights and the generator's state after some steps, three of them and every fourth probed."""
    torch.manual_seed(1)
    model = twin.make()
    optimizer = adam(model)
    guardian = guard(model, optimizer, inspect_every=4, **options).start() if options else None
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = twin.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if guardian is not None:
        guardian.stop()
    return (guardian.findings if guardian else (), losses, model.state_dict(), torch.get_rng_state())


def test_each_kind_of_model_was_asked_what_fits_it() -> None:
    asked = {}
    for twin in twins():
        model = twin.make()
        optimizer = adam(model)
        with guard(model, optimizer) as guardian:
            twin.loss(model).backward()
            optimizer.step()
            session = guardian._session
            assert session is not None
            asked[twin.name] = set(session.watch.inspection.probes)
    assert "causality" in asked["scan"]
    assert "causality" in asked["LSTM over [T, B]"]
    assert "causality" in asked["labels shifted inside"]
    assert "causality" in asked["encoder and decoder"]
    assert "causality" not in asked["masked language model"]
    assert "causality" not in asked["autoencoder of ids"]
    assert asked["normalised in forward"] == set()
