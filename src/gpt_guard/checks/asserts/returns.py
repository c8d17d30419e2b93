"""An assertion about a return or advantage function for a person's own tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.checks.returns import check_returns
from gpt_guard.records import Severity


def assert_returns(
    fn: Callable[..., Any],
    *,
    gamma: float | None = None,
    lam: float | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Assert that a function treats terminals, time limits and the borders between episodes as it must.

    Takes what `check_returns` takes. Raises CheckFailed with GG617 for each mistake, with the figures of an episode of
    two steps; GuardUsageError where the function cannot be called.
    """
    found = check_returns(fn, gamma=gamma, lam=lam, names=names).findings
    if errors := [each for each in found if each.severity is Severity.ERROR]:
        raise CheckFailed(errors)
