"""Does a return or advantage function treat the ends of episodes as it must? Asked on episodes computed by hand."""

from gpt_guard.checks.returns.check import check_returns

__all__ = ["check_returns"]
