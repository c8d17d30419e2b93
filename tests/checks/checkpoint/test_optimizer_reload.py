"""Stage 13, the optimizer: its state comes back equal and on the right device, or it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mini_gpt import MiniGPT

from .mini_project import ask, batch, line, mini


class Hoarder(torch.optim.SGD):
    """Keeps its momentum where state_dict does not look."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        return {**state, "state": {}}


class Rounding(torch.optim.AdamW):
    def load_state_dict(self, state: Any) -> None:
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"].bfloat16()
        super().load_state_dict(state)


def stepped(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> tuple[MiniGPT, torch.optim.Optimizer]:
    model = mini()
    optimizer = kind(model.parameters(), lr=1e-2, **settings)
    model(*batch())[1].backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_torchs_optimizers_come_back_equal(kind: Any, settings: dict[str, Any]) -> None:
    model, optimizer = stepped(kind, **settings)
    result = line(ask(model, optimizer=optimizer), "optimizer save and load")
    assert (result.status, result.findings) == ("passed", ())


def test_an_optimizer_without_state_makes_a_step_first() -> None:
    model = mini()
    optimizer = torch.optim.AdamW(model.parameters())
    assert line(ask(model, optimizer=optimizer), "optimizer save and load").status == "passed"
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert line(ask(model, optimizer=plain), "optimizer save and load").status == "skipped"


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [(Hoarder, {"momentum": 0.9}, "is gone"), (Rounding, {}, "has other values")],
)
def test_optimizer_state_that_is_lost_or_rounded_is_found(kind: Any, settings: dict[str, Any], words: str) -> None:
    model, optimizer = stepped(kind, **settings)
    (finding,) = line(ask(model, optimizer=optimizer), "optimizer save and load").findings
    assert finding.code == "GG721"
    assert words in finding.seen
