"""The one page of CONTRIBUTING is true: the way of a bad tensor, and the folders in the order of their imports."""

from __future__ import annotations

import os
import re
import tomllib
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import gpt_guard
from gpt_guard import Guardian, NonFiniteError

ROOT = Path(__file__).parent.parent.parent
OWN = os.path.dirname(gpt_guard.__file__) + os.sep
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST_FILES = 6


def test_a_bad_tensor_walks_through_few_files_and_each_only_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = float("nan")
    with pytest.raises(NonFiniteError) as caught, Guardian(model, optimizer, sinks=[]):
        model(torch.ones(2, 4))
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    inside = [file.removeprefix(OWN) for file in frames if file.startswith(OWN)]
    walk = [file for place, file in enumerate(inside) if not place or file != inside[place - 1]]
    assert walk[0] == "hooks/output_hooks.py"
    assert walk[-1] == "runtime/dispatch.py"
    assert len(walk) <= MOST_FILES
    assert len(set(walk)) == len(walk)
    (told,) = re.findall(r"\*\*A bad tensor's walk\*\*.*?\n\n", PAGE, re.DOTALL)
    assert [file for file in walk if file not in told] == []


def test_the_folders_stand_in_the_order_of_their_imports() -> None:
    (table,) = re.findall(r"\| folder or file \|.*?\n\n", PAGE, re.DOTALL)
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:] if line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [sorted(row) for row in rows] == [sorted(re.findall(r"(?<!\()\b\w+\b(?!\))", layer)) for layer in layers]
    assert "".join(PAGE.splitlines(keepends=True)[:3]) == "# Contributing\n\n## How it works, on one page\n"
