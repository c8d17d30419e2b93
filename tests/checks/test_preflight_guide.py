"""docs/preflight.md: its blocks run, its assertions hold and can fail, its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt_guard
from breaks import BREAKS
from gpt_guard import catalogue
from gpt_guard.checks.runner.base import NAMES

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "preflight.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What the blocks define, run one after the other."""
    found: dict[str, Any] = {"__name__": "guide"}
    for block in BLOCKS:
        exec(compile(block, "docs/preflight.md", "exec", dont_inherit=True), found)
    return found


def test_the_function_passes_on_its_model(namespace: dict[str, Any]) -> None:
    assert namespace["report"].passed
    assert {"batches", "shapes", "causality", "generation"} <= {line.stage for line in namespace["report"].checks}


@pytest.mark.parametrize("name", ["test_data", "test_model", "test_training"])
def test_the_recipe_holds(namespace: dict[str, Any], name: str) -> None:
    torch.manual_seed(0)
    namespace[name]()


def test_the_recipe_shows_every_assertion() -> None:
    known = {name for name in gpt_guard.__all__ if name.startswith("assert_")}
    assert set(re.findall(r"\bassert_\w+", BLOCKS[1])) == known


def test_the_recipe_can_fail(namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = namespace["get_batch"]()
    monkeypatch.setitem(namespace, "get_batch", lambda: (x, x.clone()))
    with pytest.raises(AssertionError, match="GG603"):
        namespace["test_data"]()


def test_tables_name_the_stages_breaks_and_codes_there_are() -> None:
    rows = re.findall(r"^\| (\d+) \| `([a-z-]+)` \|", GUIDE, re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == list(enumerate(NAMES, start=1))
    exercises = re.findall(r"^\| `([a-z][a-z-]+)` \|", GUIDE, re.MULTILINE)
    assert len(exercises) == 7
    assert {*exercises, "nan", "python-list", "no-eval"} == set(BREAKS)
    assert set(re.findall(r"GG\d+", GUIDE)) <= set(catalogue.entries())
