"""The contract of a guard, checked where its class is defined."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.records import Finding, Observation


def test_a_misspelt_moment_is_an_error_where_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match="did you mean before_step"):

        class Misspelt(Guard):
            def befor_step(self, optimizer: Optimizer) -> None:
                """Never called."""

            def judge(self, seen: Observation) -> Iterable[Finding]:
                return ()


def test_other_arguments_are_an_error_where_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match="cannot be called"):

        class Short(Guard):
            def before_step(self) -> None:  # type: ignore[override]  # the mistake is the test
                """Would be called with an optimizer."""

            def judge(self, seen: Observation) -> Iterable[Finding]:
                return ()


def test_helpers_and_other_names_are_free() -> None:
    class Free(Guard):
        def _before_steps(self) -> None:
            """A helper."""

        def summary(self) -> str:
            return "mine"

        def judge(self, seen: Observation) -> Iterable[Finding]:
            return ()

    assert Free().summary() == "mine"
    with pytest.raises(RuntimeError, match="not attached"):
        _ = Free().watch
