"""The guards that Guardian uses when it is told nothing."""

from __future__ import annotations

from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite import FiniteGuard


def default_guards(tokenizer: Any = None, config: Any = None) -> list[Guard]:
    """A new default set."""
    return [FiniteGuard()]
