"""The guards, one file each."""

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite import FiniteGuard

__all__ = ["FiniteGuard", "Guard"]
