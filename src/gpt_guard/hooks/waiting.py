"""Outputs that wait for the next module: tested after all, accused, or let go. See `chains`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from gpt_guard.hooks.chains import Link
from gpt_guard.hooks.hook import Tap
from gpt_guard.hooks.sums import quick_sum
from gpt_guard.hooks.tensors import version_of


class Waiting(Protocol):
    """A hook that holds an output, and what its module was given, until the next output that does not wait is good.

    `before` is the one whose output the module was given, if that waits too.
    """

    index: int
    waits: bool
    version: int
    before: Waiting | None
    output: Tensor | None
    given: Any


def settle(tap: Tap) -> None:
    """Test an output that waits, since the next module was not called with it; it does not wait again."""
    newest: Waiting = tap.waiting
    newest.waits = False
    tap.succession.known.discard(newest.index)
    assert newest.output is not None
    number = quick_sum(tap, newest.index, newest.output)
    if number - number != 0.0:
        accuse(tap)
    release(tap)


def accuse(tap: Tap) -> None:
    """Something is bad behind outputs that have waited: tell the tap of those that are, the first one first."""
    links: list[tuple[int, Tensor, Link]] = []
    hook: Waiting | None = tap.waiting
    while hook is not None:
        assert hook.output is not None
        unwritten = version_of(hook.output) == hook.version
        links.append((hook.index, hook.output, Link(hook.given, unwritten, tap.succession.sites.get(hook.index))))
        hook = hook.before
    release(tap)
    for index, output, link in reversed(links):
        number = quick_sum(tap, index, output)
        if number - number != 0.0:
            tap.suspect(index, "", output, link=link)


def release(tap: Tap) -> None:
    """Let go of the outputs that have waited."""
    hook: Waiting | None = tap.waiting
    tap.waiting = None
    while hook is not None:
        before, hook.before, hook.output, hook.given = hook.before, None, None, None
        hook = before
