"""Loops that are long enough for light steps, and what was measured in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.updates.param_delta import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Moment, Observation

STEPS = 48
# By then steps are light: twenty full ones after the inspected ones.
LIGHT = 30


class Recorder(Guard):
    """Keeps what was measured, and the pace of each step; `full` has every step measured in full."""

    judged_at = frozenset({Moment.AFTER_STEP})

    def __init__(self, *, full: bool = False) -> None:
        self.seen: list[Observation] = []
        self.full: list[bool] = []
        self._all_full = full

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        if self._all_full:
            watch.pace.never_light()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.full.append(self.watch.pace.full)

    def judge(self, seen: Observation) -> Iterable[Any]:
        self.seen.append(seen)
        return ()

    def figures(self) -> list[tuple[float | None, float | None]]:
        return [(seen.update_ratio, seen.max_update) for seen in self.seen]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def run(
    between: Callable[[nn.Sequential, int], Any] = lambda model, step: None,
    *,
    full: bool = False,
    steps: int = STEPS,
    kind: Any = torch.optim.Adam,
    model: nn.Sequential | None = None,
    alone: bool = False,
    **options: Any,
) -> tuple[Guardian, Recorder]:
    """Train, with something done after each step. `alone`: the probe has no guard beside it."""
    model = net() if model is None else model
    optimizer = kind(model.parameters(), lr=0.01)
    recorder = Recorder(full=full)
    guards: list[Guard] = [ParamDeltaProbe(**options)] if alone else [ParamDeltaProbe(**options), recorder]
    guardian = Guardian(model, optimizer, guards=guards, sinks=[])
    torch.manual_seed(1)
    with guardian:
        for step in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            between(model, step)
    return guardian, recorder


def told(guardian: Guardian) -> list[tuple[str, int | None]]:
    return [(found.code, found.step) for found in guardian.findings]


@torch.no_grad()
def clip(model: nn.Sequential, step: int) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def clip_data(model: nn.Sequential, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)
