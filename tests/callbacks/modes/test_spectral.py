"""Spectral norm that is evaluated before a forward in training mode has estimated it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

WIDTH = 24


def net(normalise: Callable[[nn.Module], nn.Module] = spectral_norm) -> nn.Sequential:
    return nn.Sequential(normalise(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, 2))


def images() -> nn.Sequential:
    layer = spectral_norm(nn.Conv2d(1, 32, 3))
    return nn.Sequential(nn.Unflatten(1, (1, 4, 6)), layer, nn.Flatten(), nn.Linear(256, 2))


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    model.train()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()


def run(model: nn.Module, *parts: str, reads: Any = "immediate") -> list[Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[EvalModeAssert()], sinks=[], reads=reads) as guardian:
        for part in parts:
            evaluate(model) if part == "evaluate" else train(model, optimizer)
    return list(guardian.findings)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize(("make", "path"), [(net, "0"), (images, "1")])
def test_it_is_told_once_with_the_layer_and_the_line(make: Callable[[], nn.Module], path: str, reads: Any) -> None:
    (found,) = run(make(), "evaluate", "train", "evaluate", "train", reads=reads)
    assert (found.code, found.step, found.module, found.evaluation) == ("GG508", 0, path, True)
    assert f" 1 weight under spectral_norm (`{path}`) is not normalised:" in found.seen
    assert found.where is not None
    assert found.where.text == "model(torch.randn(4, WIDTH))"


def test_the_bound_is_one() -> None:
    model = net()
    evaluate(model)
    weight: Any = model[0].weight
    true = float(torch.linalg.matrix_norm(weight.detach(), 2))
    (found,) = run(model, "evaluate", "train")
    bounds: Any = found.evidence["at_least"]
    assert 2 < bounds["0"] <= true


@pytest.mark.parametrize("seed", range(5))
def test_one_forward_in_training_mode_is_enough(seed: int) -> None:
    torch.manual_seed(seed)
    assert run(net(), "train", "evaluate", "train", "evaluate") == []


def test_estimates_that_were_loaded_are_silent() -> None:
    old, new = net(), net()
    for _ in range(3):
        old(torch.randn(2, WIDTH))
    new.load_state_dict(old.state_dict())
    assert run(new, "evaluate", "train") == []


def test_the_parametrization_is_silent() -> None:
    assert run(net(parametrizations.spectral_norm), "evaluate", "train") == []


def test_it_is_quiet_once_it_is_detached() -> None:
    model, guard = net(), EvalModeAssert()
    with Guardian(model, None, guards=[guard], sinks=[], replay=False) as guardian:
        session = guardian._session
        assert session is not None
        (listener,) = session.watch.forward_ended
    evaluate(model)
    listener(None)
    assert "GG508" not in {found.code for found in guardian.findings}
