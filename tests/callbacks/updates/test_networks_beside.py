"""A network beside the model that nobody steps: a target or a teacher is a note, a forgotten layer a warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, Guardian, Severity


def network(out: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, out))


def said(
    loss: Callable[[nn.Module, Tensor], Tensor], after: Callable[[nn.Module], None] = lambda model: None
) -> list[Finding]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[], summary=False) as guardian:
        for _ in range(25):
            optimizer.zero_grad()
            loss(model, torch.randn(32, 4)).backward()
            optimizer.step()
            after(model)
    return [found for found in guardian.findings if found.code == "GG303"]


def against(target: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: F.smooth_l1_loss(model(x), 0.9 * target(x.flip(0)) + 1.0)


@pytest.mark.parametrize(
    "target",
    [network(), nn.Linear(4, 2), nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3), nn.Flatten())],
    ids=["of the same form", "one layer", "a convolution"],
)
def test_a_target_network_with_gradients_is_a_note(target: nn.Module) -> None:
    (found,) = said(against(target))
    assert found.severity is Severity.INFO
    assert found.causes[0].startswith("A target network or a teacher")


def test_a_target_that_follows_slowly_is_silent() -> None:
    target = network()

    def follow(model: nn.Module) -> None:
        for theirs, own in zip(target.parameters(), model.parameters(), strict=True):
            theirs.data.lerp_(own.data, 0.05)

    assert said(against(target), follow) == []


CENTRES = nn.Parameter(torch.randn(3, 2))
SCALE = nn.Parameter(torch.zeros(()))
BEFORE, BEHIND = nn.Linear(4, 4), nn.Linear(2, 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: (model(x) - CENTRES[torch.arange(len(x)) % 3]).square().mean(),
        lambda model, x: F.cross_entropy(model(x) * SCALE.exp(), torch.arange(len(x)) % 2),
        lambda model, x: model(BEFORE(x)).square().mean(),
        lambda model, x: BEHIND(model(x)).square().mean(),
    ],
    ids=["centres", "a temperature", "a layer before the model", "a layer behind it"],
)
def test_what_the_model_works_with_and_nobody_trains_is_a_warning(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    (found,) = said(loss)
    assert found.severity is Severity.WARNING
