"""Every kind of silent bug: two instances at least, each caught, named and in time; every healthy twin silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.catalogue import entries

from .kinds import INSTANCES
from .kinds_table import GROUPS, lines, of_kind, seen

KINDS = [kind for kinds in GROUPS.values() for kind in kinds]
PAGE = Path(__file__).parents[2] / "docs" / "silent-bugs.md"

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def test_the_table_has_all_kinds() -> None:
    assert set(KINDS) >= {each.kind for each in INSTANCES if each.code is not None}
    assert len(set(KINDS)) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_found_and_its_healthy_twins_are_left_alone(kind: str) -> None:
    bugs, twins = of_kind(kind)
    assert len(bugs) >= 2
    assert twins
    for each in map(seen, bugs):
        told = [(one.code, one.step, one.seen) for one in each.found]
        assert each.finding is not None, (each.instance.name, told)
        assert each.named, (each.instance.name, told)
        assert each.in_time, (each.instance.name, told)
    loud = [each for each in map(seen, twins) if not each.silent]
    assert [(each.instance.name, [(one.code, one.seen) for one in each.found]) for each in loud] == []


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [line for line in lines() if line not in page] == []


def test_the_pages_example_finds_what_it_says() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "docs/silent-bugs.md", "exec", dont_inherit=True), namespace)
    assert [(found.code, found.step) for found in namespace["guardian"].findings] == [("GG652", 0), ("GG209", 2)]


def test_the_page_names_every_default_guard_and_codes_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [guard.name for guard in default_guards() if f"`{guard.name}`" not in page] == []
    assert set(re.findall(r"GG\d{3}", page)) <= set(entries())
