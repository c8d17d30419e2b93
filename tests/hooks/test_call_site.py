"""The line a call came from, told again where it comes from elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpt_guard.hooks import call_site
from gpt_guard.hooks.call_site import CallSite
from gpt_guard.hooks.frames import is_foreign

Ask = Callable[[CallSite], None]


def first(site: CallSite) -> None:
    site.find()


def later(site: CallSite) -> None:
    site.again()


def deeper(ask: Ask, site: CallSite) -> None:
    ask(site)


def text(site: CallSite) -> str:
    assert site.line is not None
    return site.line.text


@pytest.mark.parametrize("ask", [first, later])
def test_the_innermost_line_of_the_users_is_told(ask: Ask) -> None:
    site = CallSite()
    assert site.line is None
    ask(site)
    assert text(site) == ("site.find()" if ask is first else "site.again()")


def test_another_line_of_the_same_function_is_told() -> None:
    site = CallSite()
    for turn in range(3):
        if turn < 2:
            site.again()  # usual
        else:
            site.again()  # other
    assert text(site) == "site.again()  # other"


def test_the_stack_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site = CallSite()
    # Called from a function of torch's, as a listener to backward() is.
    again = torch.no_grad()(site.again)
    walked: list[str] = []

    def noted(file: str) -> bool:
        walked.append(file)
        return is_foreign(file)

    monkeypatch.setattr(call_site, "is_foreign", noted)
    for _ in range(3):
        again()
    assert text(site) == "again()"
    assert walked.count(__file__) == 1


def test_another_function_and_another_depth_are_found() -> None:
    site = CallSite()
    deeper(first, site)
    assert text(site) == "site.find()"
    later(site)
    assert text(site) == "site.again()"
    site.again()  # here
    assert text(site) == "site.again()  # here"
    deeper(later, site)
    assert site.line is not None
    assert site.line.function == "later"


def test_a_stack_that_is_no_longer_so_deep_is_walked() -> None:
    site = CallSite()
    site.find()
    site._depth = 10_000
    site.again()  # walked
    assert text(site) == "site.again()  # walked"
