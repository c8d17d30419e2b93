"""GradScalers: their scale is in no figure, and the steps they skip are not steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.scaler import GradScaler, checked_scaler, patches
from gpt_guard.records import Observation

_SCALE, _STEP, _UNSCALE = GradScaler.scale, GradScaler.step, GradScaler.unscale_


@pytest.fixture(autouse=True)
def class_as_found() -> Any:
    yield
    assert GradScaler.scale is _SCALE
    assert GradScaler.step is _STEP
    assert GradScaler.unscale_ is _UNSCALE


@pytest.fixture(params=["immediate", "per_step"])
def reads(request: pytest.FixtureRequest) -> Any:
    return request.param


def line(slope: float = 2.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, slope)
    return model


def newest(guardian: Guardian) -> Observation:
    assert guardian.latest is not None
    return guardian.latest


def value(number: float) -> Tensor:
    return torch.tensor([[number]])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_figures_are_unscaled(reads: Any, fused: bool, unscale: bool) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            for part in (1.0, 3.0):
                scaler.scale(model(value(part)).mean() / 2).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    seen = newest(guardian)
    assert seen.loss == pytest.approx(4.0, rel=1e-2)
    assert seen.grad_norm == pytest.approx(2.0)
    assert seen.grad_norm_clipped == pytest.approx(0.5 if unscale else 2.0, rel=1e-4)
    assert seen.clipped is unscale
    assert guardian.step == 3
    assert not guardian.findings


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_healthy_and_not_counted(reads: Any, fused: bool) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(model(value(3.0)).mean() * 2).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= 2.0**126:
                assert newest(guardian).skipped
                assert newest(guardian).grad_norm is None
    report = guardian.report()
    assert 0 < report.skipped_steps < 6
    assert guardian.step == 6 - report.skipped_steps
    assert newest(guardian).grad_norm == pytest.approx(6.0)
    assert not guardian.findings


def test_a_disabled_scaler_changes_nothing(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        scaler.scale(model(value(3.0)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert newest(guardian).loss == pytest.approx(6.0)
    assert guardian.step == 1


def test_two_models_with_scales_of_their_own(reads: Any) -> None:
    models = [line(), line()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-9) for model in models]
    scalers = [GradScaler("cpu", init_scale=scale) for scale in (16.0, 4096.0)]
    first = Guardian(models[0], optimizers[0], sinks=[], reads=reads)
    second = Guardian(models[1], optimizers[1], sinks=[], reads=reads)
    with first, second:
        for _ in range(2):
            for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(value(3.0)).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
    for guardian in (first, second):
        assert newest(guardian).loss == pytest.approx(6.0)
        assert newest(guardian).grad_norm == pytest.approx(3.0)
        assert guardian.step == 2


def test_one_model_scaled_and_one_not(reads: Any) -> None:
    scaled, plain = line(), line()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-9) for model in (scaled, plain)]
    scaler = GradScaler("cpu", init_scale=4096.0)
    first = Guardian(scaled, optimizers[0], sinks=[], reads=reads)
    second = Guardian(plain, optimizers[1], sinks=[], reads=reads)
    with first, second:
        for _ in range(2):
            scaler.scale(scaled(value(3.0)).mean()).backward()
            plain(value(3.0)).mean().backward()
            scaler.step(optimizers[0])
            optimizers[1].step()
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    for guardian in (first, second):
        assert newest(guardian).grad_norm == pytest.approx(3.0)
        assert newest(guardian).loss == pytest.approx(6.0)


class OwnScaler(GradScaler):
    """Overrides what it needs and calls its base, as people do."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


def test_a_subclass_is_told_once(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = OwnScaler("cpu", init_scale=2.0**127)
    with Guardian(model, optimizer, sinks=[], scaler=scaler, reads=reads) as guardian:
        scaler.scale(model(value(3.0)).mean() * 2).backward()
        scaler.step(optimizer)
        scaler.update()
    assert guardian.report().skipped_steps == 1
    assert "scale" not in vars(OwnScaler)


def test_a_scaled_step_of_a_stranger_is_not_ours() -> None:
    model, stranger = line(), line()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=1e-9) for each in (model, stranger))
    scaler = GradScaler("cpu", init_scale=2.0**127)
    with Guardian(model, optimizer, sinks=[]) as guardian:
        scaler.scale(stranger(value(3.0)).mean() * 2).backward()
        scaler.step(other)
        scaler.update()
        model(value(3.0)).mean().backward()
        optimizer.step()
    assert guardian.report().skipped_steps == 0
    assert newest(guardian).grad_norm == pytest.approx(3.0)


def test_scaler_state_is_the_same_as_without(reads: Any) -> None:
    def run(watched: bool) -> tuple[dict[str, Any], Tensor]:
        torch.manual_seed(0)
        model = line()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        guardian = Guardian(model, optimizer, sinks=[], reads=reads)
        if watched:
            guardian.start()
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(1, 1)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        guardian.stop()
        return copy.deepcopy(scaler.state_dict()), model.weight.detach()

    assert run(True) == run(False)


def test_which_classes_are_patched() -> None:
    assert patches(GradScaler("cpu")) == patches(None)
    assert len(patches(OwnScaler("cpu"))) == 6
    assert patches(OwnScaler("cpu")) == patches(OwnScaler("cpu"))
    assert checked_scaler(None) is None
    with pytest.raises(GuardUsageError, match="int without scale, step, is_enabled"):
        checked_scaler(3)
