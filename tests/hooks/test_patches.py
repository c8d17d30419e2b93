"""Patches: told while there are listeners, and gone without a trace afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpt_guard.hooks.patches import Patch


def around(original: Any, listeners: tuple[list[str], ...], *args: Any, **kwargs: Any) -> Any:
    for listener in listeners:
        listener.append("told")
    return original(*args, **kwargs)


def original(value: int, times: int = 2) -> int:
    return value * times


class Base:
    def act(self) -> str:
        return "base"


class Heir(Base):
    """Adds nothing."""


@pytest.fixture
def owner() -> SimpleNamespace:
    return SimpleNamespace(act=original)


def test_told_with_all_arguments_and_the_result_passed_on(owner: SimpleNamespace) -> None:
    patch, first, second = Patch(owner, "act", around), list[str](), list[str]()
    patch.add(first)
    assert owner.act(2) == 4
    patch.add(second)
    assert owner.act(2, times=3) == 6
    assert (len(first), len(second)) == (2, 1)
    assert owner.act.__wrapped__ is original
    patch.remove(first)
    owner.act(1)
    assert (len(first), len(second)) == (2, 2)
    patch.remove(second)
    assert owner.act is original


def test_listeners_leave_in_any_order_and_twice(owner: SimpleNamespace) -> None:
    patch, first, second = Patch(owner, "act", around), list[str](), list[str]()
    for _ in range(3):
        patch.add(first)
        patch.add(second)
        patch.remove(second)
        patch.remove(second)
        patch.remove(first)
        assert owner.act is original


def test_somebody_elses_replacement_on_top_stays(owner: SimpleNamespace) -> None:
    patch, mine = Patch(owner, "act", around), list[str]()
    patch.add(mine)
    ours = owner.act

    def theirs(value: int) -> int:
        return int(ours(value)) + 1

    owner.act = theirs
    assert owner.act(2) == 5
    patch.remove(mine)
    assert owner.act is theirs
    assert owner.act(2) == 5
    assert len(mine) == 1


def test_used_again_under_somebody_elses_replacement(owner: SimpleNamespace) -> None:
    patch, mine = Patch(owner, "act", around), list[str]()
    patch.add(mine)
    ours = owner.act

    def theirs(value: int) -> int:
        return int(ours(value)) + 1

    owner.act = theirs
    patch.remove(mine)
    patch.add(mine)
    assert owner.act(2) == 5
    assert mine
    patch.remove(mine)
    assert owner.act is theirs


def test_used_again_after_somebody_else_has_put_the_original_back(owner: SimpleNamespace) -> None:
    patch, mine = Patch(owner, "act", around), list[str]()
    patch.add(mine)
    owner.act = lambda value: value
    patch.remove(mine)
    owner.act = original
    patch.add(mine)
    owner.act(1)
    assert mine == ["told"]
    patch.remove(mine)
    assert owner.act is original


def test_an_inherited_attribute_is_inherited_again() -> None:
    patch, mine = Patch(Heir, "act", around), list[str]()
    patch.add(mine)
    assert Heir().act() == "base"
    patch.remove(mine)
    assert mine == ["told"]
    assert "act" not in vars(Heir)


def test_errors_pass_through(owner: SimpleNamespace) -> None:
    patch, mine = Patch(owner, "act", around), list[str]()
    patch.add(mine)
    with pytest.raises(TypeError):
        owner.act()
    patch.remove(mine)
    assert owner.act is original
