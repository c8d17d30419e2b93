"""Runs that fail under a Guardian and leave a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gpt_guard import Guardian
from gpt_guard.blackbox.bundle import Bundle, read_bundle
from gpt_guard.errors import GuardError
from gpt_guard.records import Finding

from .failing_models import CAUSES, LogOfZero, inputs

HERE = Path(__file__).parent
Fail = Callable[..., "Failed"]


class Failed(NamedTuple):
    """A failed run: its finding, its folder and its bundle."""

    finding: Finding
    run_dir: Path
    path: Path

    @property
    def bundle(self) -> Bundle:
        return read_bundle(self.path)


def built(cause: str) -> nn.Module:
    model = CAUSES[cause][0]()
    if isinstance(model, LogOfZero):  # healthy until the batch is larger
        with torch.no_grad():
            model.body.weight.copy_(torch.eye(4))
            model.body.bias.fill_(0.5)
    return model.half() if cause == "half" else model


def train(model: nn.Module, guardian: Guardian, optimizer: torch.optim.Optimizer, cause: str, steps: int = 40) -> None:
    with guardian:
        for step in range(steps):
            args, kwargs = inputs(cause, step)
            optimizer.zero_grad()
            model(*args, **kwargs).sum().backward()
            optimizer.step()


@pytest.fixture
def fail(tmp_path: Path) -> Fail:
    """Train until the model of a cause fails, with what Guardian is given; returns what is left."""

    def run(cause: str = "log", wrap: Callable[[nn.Module], nn.Module] | None = None, **options: Any) -> Failed:
        model = built(cause)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        watched = model if wrap is None else wrap(model)
        guardian = Guardian(watched, optimizer, run_dir=tmp_path / "run", sinks=[], **options)
        with pytest.raises(GuardError) as caught:
            train(watched, guardian, optimizer, cause)
        finding = caught.value.finding
        return Failed(finding, tmp_path / "run", Path(finding.bundle or tmp_path / "no bundle"))

    return run


@pytest.fixture
def fresh() -> LogOfZero:
    """A model that fits the bundle of the cause "log"; its weights are others."""
    return LogOfZero()


def bundles(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir() if path.is_dir())


def guardian_of(model: nn.Module, run_dir: Path | None, **options: Any) -> tuple[Guardian, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Guardian(model, optimizer, run_dir=run_dir, sinks=[], **options), optimizer
