"""What lives how long: activations, copies, counts, and other people's patches."""

from __future__ import annotations

import copy
import gc
import io
import sys
import weakref
from typing import Any

import pytest
import torch

from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian

from .small_net import Net, setup, train


def test_a_guardian_that_was_left_keeps_nothing_alive() -> None:
    model, optimizer = setup()
    guardian = Guardian(model, optimizer, sinks=[])
    with guardian:
        train(model, optimizer)
    gone: list[weakref.ref[Any]] = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []
    assert guardian.report().steps == 3
    with pytest.raises(GuardUsageError, match="no longer exists"):
        guardian.start()


def test_reference_counts_of_the_model_are_as_before() -> None:
    model, optimizer = setup()
    train(model, optimizer)
    gc.collect()
    before = [sys.getrefcount(module) for module in model.modules()]
    for _ in range(3):
        with Guardian(model, optimizer, sinks=[]):
            train(model, optimizer)
    gc.collect()
    assert [sys.getrefcount(module) for module in model.modules()] == before


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_no_activation_lives_longer_for_being_watched(reads: Any) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[], reads=reads):
        for _ in range(2):
            x = torch.randn(5, 4)
            logits = model(x)
            hidden = weakref.ref(logits)
            loss = logits.pow(2).mean()
            del logits
            loss.backward()
            optimizer.step()
            batch, total = weakref.ref(x), weakref.ref(loss)
            del x, loss
            assert (hidden(), total(), batch()) == (None, None, None)
        with torch.no_grad():
            output = weakref.ref(model(torch.randn(5, 4)))
        assert output() is None


def test_entered_again_it_goes_on_counting() -> None:
    model, optimizer = setup()
    guardian = Guardian(model, optimizer, sinks=[], start_step=10)
    for expected in (13, 16):
        with guardian:
            train(model, optimizer)
        assert guardian.step == expected
    train(model, optimizer)
    assert guardian.step == 16


def test_counting_goes_on_after_a_resume() -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[]) as first:
        train(model, optimizer)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second = Guardian(model, optimizer, sinks=[])
    second.load_state_dict(torch.load(saved, weights_only=True))
    with second:
        train(model, optimizer)
    assert second.step == 6
    assert second.latest is not None
    assert second.latest.samples == 30


def copies(model: Net) -> dict[str, Net]:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return {"deepcopy": copy.deepcopy(model), "pickle": torch.load(saved, weights_only=False)}


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_a_watched_model_are_not_watched(reads: Any, how: str) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        train(model, optimizer)
        twin = copies(model)[how]
        seen = guardian.latest
        twin.eval()
        with torch.no_grad():
            twin(torch.full((5, 4), float("nan")))
        assert guardian.latest is seen
        assert guardian.findings == ()
        train(model, optimizer)
    assert guardian.step == 6
    assert guardian.latest is not None
    assert guardian.latest.samples == 30


def test_a_pickled_watched_model_can_be_read_without_gpt_guard() -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[]):
        saved = io.BytesIO()
        torch.save(model, saved)
        torch.save(optimizer, saved)
    assert b"gpt_guard" not in saved.getvalue()


def test_state_dicts_are_the_same_inside() -> None:
    model, optimizer = setup()
    keys = list(model.state_dict())
    with Guardian(model, optimizer, sinks=[]):
        assert list(model.state_dict()) == keys
        assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_somebody_else_patches_backward_meanwhile() -> None:
    model, optimizer = setup()
    original = torch.autograd.backward
    calls: list[int] = []
    with Guardian(model, optimizer, sinks=[]) as guardian:
        ours: Any = torch.autograd.backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        torch.autograd.backward = theirs
        train(model, optimizer)
    assert guardian.step == len(calls) == 3
    assert torch.autograd.backward is theirs
    with Guardian(model, optimizer, sinks=[]) as again:
        train(model, optimizer)
    assert again.latest is not None
    assert (again.latest.micro_batches, len(calls)) == (1, 6)
    torch.autograd.backward = original
    with Guardian(model, optimizer, sinks=[]) as last:
        train(model, optimizer)
    assert last.latest is not None
    assert last.latest.loss is not None
    assert torch.autograd.backward is original
