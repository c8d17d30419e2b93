"""A Guardian that is made and never entered is not silent about it, if its model was trained."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard import Guardian

from .loop_kit import net, train

SCRIPT = """
import torch
from torch import nn
from gpt_guard import Guardian
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guardian = Guardian(model, optimizer)
{begin}
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
{end}
"""


def trained() -> nn.Module:
    """A model that was trained beside a Guardian, which is gone by now."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(model, optimizer, sinks=[])
    for _ in train(model, optimizer, range(3)):
        pass
    assert guardian.report().not_watched == ("everything: this Guardian was never entered",)
    return model


def test_it_is_said_once_when_the_guardian_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpt_guard"):
        model = trained()
        gc.collect()
    (message,) = [each for each in caplog.messages if "never entered" in each]
    assert type(model).__name__ in message
    assert "with guardian:" in message


@pytest.mark.parametrize("entered", [True, False])
def test_nothing_is_said_of_one_that_was_entered_or_whose_model_was_left_alone(
    entered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian: Any = Guardian(model, optimizer, sinks=[], summary=False)
    with caplog.at_level(logging.WARNING, "gpt_guard"):
        if entered:
            with guardian:
                for _ in train(model, optimizer, range(2)):
                    pass
            assert not any("never entered" in spot for spot in guardian.report().not_watched)
        del guardian
        gc.collect()
    assert not any("never entered" in each for each in caplog.messages)


@pytest.mark.parametrize(
    ("begin", "end", "told"), [("", "", True), ("guardian.start()", "guardian.stop()", False)], ids=["never", "started"]
)
def test_it_is_said_at_the_end_of_a_script(begin: str, end: str, told: bool) -> None:
    script = SCRIPT.format(begin=begin, end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ("never entered" in done.stderr) is told
