"""What is changed in torch while a Guardian watches is what docs/while-watching.md lists, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt_guard import Guardian

from .test_interrupts import as_it_is, left_behind, parts, steps

DOC = (Path(__file__).parent.parent.parent / "docs" / "while-watching.md").read_text(encoding="utf-8")
EVERY_STEP, INSPECTED = DOC.split("Only in inspected steps")


def changed(*, inspect_steps: int) -> set[str]:
    """The attributes that differ inside, by their own names; of hooks only that there are some."""
    model, optimizer, _ = parts()
    before = as_it_is(model, optimizer)
    with Guardian(model, optimizer, sinks=[], summary=False, inspect_steps=inspect_steps):
        found = left_behind(before, as_it_is(model, optimizer))
        steps(model, optimizer)
    return {"hooks" if name.endswith("_hooks") else name.rpartition(".")[2] for name in found}


@pytest.mark.parametrize(("inspect_steps", "told"), [(0, EVERY_STEP), (3, DOC)])
def test_the_list_is_complete(inspect_steps: int, told: str) -> None:
    found = changed(inspect_steps=inspect_steps)
    assert found
    known = told.replace("TorchFunctionMode", "function modes")
    assert [name for name in sorted(found) if name not in known] == []


def test_what_is_listed_is_really_changed() -> None:
    found = changed(inspect_steps=3)
    assert {"backward", "scale", "unscale_", "train", "__iter__", "zero_grad", "OrderedDict"} <= found


def test_outside_of_inspected_steps_nothing_in_nn_utils_is_replaced() -> None:
    assert not {name for name in changed(inspect_steps=0) if "clip" in name or name == "zero_grad"}
